"""The plan of a parameter group: matrices, the owner of each, and buckets.

`make_plan` turns layouts into `Bucket`s: families of matrices on the same ranks, owners by expected
work (load_balance.py), buckets by expected time (bucketing.py). `along_backward` and
`along_forward` cut the buckets anew for the overlap modes. `plan_chunks` is the counterpart for
AdamW with state at owners. `digest` lets ranks compare plans.

All functions are pure: every rank computes the same plan from layouts, options and measured times.
Touches no tensor, sends nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from .bucketing import OVERLAP_BUCKETS, by_cost, cut, in_equal_buckets, rounds_of
from .cost_model import BucketTimes, CostModel
from .load_balance import assign
from .memory_model import (
    ALIGNMENT,
    ChunkPlanInputs,
    MemoryModel,
    PlanInputs,
    total,
    workspace_bytes,
)

if TYPE_CHECKING:
    from ..params.layout import Layout

Family = tuple[str, tuple[int, ...]]  # (route, ranks)
Cost = Callable[[int, int], int]  # (rows, cols) -> work; a CostModel, or any function in tests

# Routes of plain parameters (no DTensors) whose state one owner stores: with reduced gradients, and
# with unreduced gradients
OWNER_STATE_ROUTES = "own", "reduce"


class Matrix(NamedTuple):
    """A matrix to orthogonalize, `rows` x `cols`: one unit (params/units.py) of the (R, C) at
    leading index `at` of a parameter.

    In a bucket of chunks (`plan_chunks`): `rows` rows of every owner's part of a parameter, from
    row `at[0]` of the part on. A tuple, since plans hash each matrix many times.
    """

    param: int  # index of the parameter in the group's plan
    at: tuple[int, ...]  # leading indices, for example the expert; () for a 2-D parameter
    rows: int
    cols: int
    unit: int = 0  # number in `Layout.unit_boxes`; 0 if the whole (R, C) is one unit
    # Shape of the part that the owner selects and orthogonalizes; None: the whole matrix
    selected: tuple[int, int] | None = None

    @property
    def iterated_shape(self) -> tuple[int, int]:
        """(rows, columns) of the input of Newton-Schulz."""
        return self.selected or (self.rows, self.cols)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True)
class Bucket:
    """Matrices that are exchanged in a pair of all-to-alls over `ranks`, and stepped together.

    [Note: routes] `route` is a key of `BUCKET_UPDATES` (execution/elementwise_updates.py):
    "local": a single rank stores the matrices; nothing is sent.
    "exchange": pieces of U to the owner, pieces of O back. State at the pieces; of DTensors with
    state_at_owners, state that the rule reads at the owner.
    "own": as "exchange" for plain parameters, with the state at the owner.
    "reduce": unreduced gradients to the owner, which averages them and stores the state.
    "own_elementwise", "reduce_elementwise": AdamW, as "own" and "reduce", see `plan_chunks`.
    """

    route: str
    ranks: tuple[int, ...]  # global ranks, ascending
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]  # global rank of each matrix's owner; () in a bucket of chunks
    # Expected times; None without measured times. Not compared: plans are equal if the work is
    times: BucketTimes | None = field(default=None, compare=False)
    # Bytes of (bucket buffer, shared scratch) on the rank that needs the most
    memory: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of a workspace with room for any number of buckets like the bucket, on any rank."""
        return workspace_bytes(*self.memory)


def check_bucket_buffers(buckets: Iterable[Bucket], given: int | None) -> None:
    """Raise ValueError if buckets with a buffer each need more than `given` bytes on some rank.

    `given`: `workspace_bytes` of the user; None allows any size. "local" buckets share a buffer.
    """
    # Rank -> bytes: of all buffers but the local one, of the local buffer, of the shared scratch
    own_buffers, local_buffer = Counter(), Counter()
    scratch = Counter()
    for bucket in buckets:
        buffer_bytes, scratch_bytes = bucket.memory
        for rank in bucket.ranks:
            own_buffers[rank] += buffer_bytes * (bucket.route != "local")
            local_bytes = buffer_bytes * (bucket.route == "local")
            local_buffer[rank] = max(local_buffer[rank], local_bytes)
            scratch[rank] = max(scratch[rank], scratch_bytes)
    needed = max((own_buffers[r] + local_buffer[r] + scratch[r] for r in scratch), default=0)
    if given is not None and needed > given:
        raise ValueError(
            f"workspace_bytes={given} is too small: with overlap_backward=True every bucket has a "
            f"buffer of its own, which takes {needed} bytes together; pass at least that, or None, "
            "or leave overlap_backward out"
        )


def make_plan(
    layouts: Sequence[Layout],
    cost: Cost,
    loads: dict[frozenset[int], Counter],
    inputs: PlanInputs | None = None,
    *,
    rank_bytes: int = 1 << 30,
    plain: str = "exchange",
    minimize_workspace: bool = False,
    state_layouts: Mapping[str, Sequence[Layout]] | None = None,
) -> list[Bucket]:
    """Return the buckets of a parameter group; equal on every rank.

    `layouts`: of each parameter. `state_layouts`: state key -> layout of the state of each
    parameter, of state that owners read. Parameters of equal shape, placement and split share a
    Layout object.
    `cost`: (rows, cols) -> work of a matrix, an int. A CostModel with measured times also decides
    how buckets are cut and ordered; without times the buckets are as few as possible.
    `loads`: {ranks that know of the work: Counter of rank -> work}, from earlier plans of the step;
    updated in place. `inputs`: None for defaults.
    `rank_bytes`: workspace bytes of a rank; a bucket of a single round may take more.
    `plain`: route of plain parameters on several ranks: "exchange", "own" or "reduce".
    `minimize_workspace`: prefer less memory if the expected time grows by at most 1 %.
    """
    families = _families(layouts, list((state_layouts or {}).values()), plain)
    cost_model = cost if getattr(cost, "measured", False) else None
    owner_of = _assign(families, layouts, cost, loads)
    buckets = []
    # Shapes of the matrices of one rank, by cost -> (the matrices, their buckets)
    known: dict[tuple, tuple[list[Matrix], list[Bucket]]] = {}
    # The key has no local information: ranks that share several families issue their collectives
    # in one order
    for route, ranks in sorted(families, key=lambda family: (bucket_sort_key(family[1]), family)):
        matrices = by_cost(families[route, ranks], cost)
        shapes = tuple((m.rows, m.cols, m.selected) for m in matrices)
        if route == "local" and shapes in known:
            # Every rank stores experts and heads of its own, mostly as many as other ranks. The
            # buckets of matrices that are not sent depend on shapes alone.
            counterpart = dict(zip(known[shapes][0], matrices))
            buckets += [_for_rank(ranks, counterpart, bucket) for bucket in known[shapes][1]]
            continue
        memory_model = MemoryModel(layouts, inputs or PlanInputs(), route, ranks, state_layouts)
        found = _cut(memory_model, matrices, owner_of, cost_model, rank_bytes, minimize_workspace)
        if route == "local":
            known[shapes] = matrices, found
        buckets += found
    return buckets


def _cut(
    memory_model: MemoryModel,
    matrices: Sequence[Matrix],
    owner_of: Mapping[Matrix, int],
    cost_model: CostModel | None,
    rank_bytes: int,
    minimize_workspace: bool,
) -> list[Bucket]:
    """Return the buckets of one family; `matrices`: in the order of `by_cost`."""
    groups = cut(
        rounds_of(matrices, owner_of, memory_model),
        memory_model.workspace_for,
        rank_bytes,
        partial(memory_model.predicted_end, cost_model) if cost_model else None,
        memory_model.bytes_together if minimize_workspace else None,
    )
    found = []
    for rounds in groups:
        together = [matrix for one in rounds for matrix in one.matrices]
        found.append(_bucket(memory_model, together, owner_of, total(rounds), cost_model))
    return found


def _for_rank(ranks: tuple[int], counterpart: Mapping[Matrix, Matrix], bucket: Bucket) -> Bucket:
    """Return a "local" bucket of one rank for another rank. `counterpart`: matrix of the bucket ->
    matrix of equal shape on the other rank.
    """
    matrices = tuple(counterpart[m] for m in bucket.matrices)
    return replace(bucket, ranks=ranks, matrices=matrices, owners=ranks * len(matrices))


def _bucket(
    memory_model: MemoryModel,
    matrices: Sequence[Matrix],
    owner_of: Mapping[Matrix, int],
    taken: Counter,
    cost_model: CostModel | None,
) -> Bucket:
    """Return a bucket with its expected times and bytes; `taken`: sum of the footprints."""
    times = cost_model and memory_model.bucket_times(taken, cost_model)
    memory = memory_model.memory(taken)
    owners = tuple(owner_of[m] for m in matrices)
    return Bucket(memory_model.route, memory_model.ranks, tuple(matrices), owners, times, memory)


def along_backward(
    buckets: Sequence[Bucket],
    layouts: Sequence[Layout],
    cost: Cost,
    inputs: PlanInputs,
    latency: int,
    state_layouts: Mapping[str, Sequence[Layout]] | None = None,
) -> list[Bucket]:
    """Cut the matrices anew, with unchanged owners, in the order in which backward computes
    gradients: from the last parameter to the first. "local" buckets are returned unchanged.

    `latency`: fewest bytes per rank of a bucket, see `cost_model.latency_bytes`. `state_layouts`:
    as in `make_plan`.
    """

    def cut_anew(owner_of: Mapping[Matrix, int], least: float, pack: Callable) -> list[Bucket]:
        order = sorted(owner_of, key=lambda m: (-m.param, m.at, m.unit))
        return pack(in_equal_buckets([(m,) for m in order], least))

    return _along(cut_anew, buckets, layouts, cost, inputs, latency, state_layouts)


def along_forward(
    buckets: Sequence[Bucket],
    layouts: Sequence[Layout],
    cost: Cost,
    inputs: PlanInputs,
    latency: int,
    rank_bytes: int,
    state_layouts: Mapping[str, Sequence[Layout]] | None = None,
) -> list[Bucket]:
    """Cut the matrices anew, with unchanged owners, in the order in which forward uses parameters:
    from the first to the last. "local" buckets are returned unchanged.

    A bucket takes whole rounds, the next matrix of every owner, so every owner has work. `latency`,
    `state_layouts`: as in `along_backward`. `rank_bytes`: the number of buckets is doubled until
    every bucket fits.
    """

    def cut_anew(owner_of: Mapping[Matrix, int], least: float, pack: Callable) -> list[Bucket]:
        queues = defaultdict(list)
        for matrix in sorted(owner_of, key=lambda m: (m.param, m.at, m.unit)):
            queues[owner_of[matrix]].append(matrix)
        rounds = [
            tuple(m for m in together if m is not None)
            for together in itertools.zip_longest(*queues.values())
        ]
        found, count = pack(in_equal_buckets(rounds, least)), OVERLAP_BUCKETS
        # The bytes of a bucket depend on its owners and pieces, so the number of buckets is found
        # by trial. A round cannot be cut, so the trials end at one round per bucket.
        while max(b.nbytes for b in found) > rank_bytes and len(found) < len(rounds):
            count *= 2
            found = pack(in_equal_buckets(rounds, 0, count))
        return found

    return _along(cut_anew, buckets, layouts, cost, inputs, latency, state_layouts)


def _along(
    cut_anew: Callable,
    buckets: Sequence[Bucket],
    layouts: Sequence[Layout],
    cost: Cost,
    inputs: PlanInputs,
    latency: int,
    state_layouts: Mapping[str, Sequence[Layout]] | None,
) -> list[Bucket]:
    """Apply `cut_anew(owner_of, least, pack)` to every family; keep "local" buckets.

    `least`: fewest elements of a bucket. `pack`: turns lists of matrices into buckets.
    """
    cost_model = cost if getattr(cost, "measured", False) else None
    families: dict[Family, dict[Matrix, int]] = defaultdict(dict)  # -> matrix -> owner
    for bucket in buckets:
        families[bucket.route, bucket.ranks].update(zip(bucket.matrices, bucket.owners))
    found = []
    for family, owner_of in families.items():
        route, ranks = family
        if route == "local":
            found += [bucket for bucket in buckets if (bucket.route, bucket.ranks) == family]
            continue
        memory_model = MemoryModel(layouts, inputs, route, ranks, state_layouts)
        pack = partial(_packed, memory_model, owner_of, cost_model)
        # Bytes per rank -> elements of all ranks
        found += cut_anew(owner_of, latency * len(ranks) / inputs.element, pack)
    return found


def _packed(
    memory_model: MemoryModel,
    owner_of: Mapping[Matrix, int],
    cost_model: CostModel | None,
    groups: Iterable[tuple[Matrix, ...]],
) -> list[Bucket]:
    """Return a bucket of each group."""
    found = []
    for matrices in groups:
        taken = memory_model.sum((m, owner_of[m]) for m in matrices)
        found.append(_bucket(memory_model, matrices, owner_of, taken, cost_model))
    return found


def on_several_ranks(buckets: Iterable[Bucket], layouts: Sequence[Layout]) -> frozenset[int]:
    """Return the indices of parameters that several ranks step together: parameters in a bucket of
    several ranks, and parameters with a matrix of which several ranks store elements.

    Ranks that each store whole units of a matrix send nothing, but must agree on the units and on
    whether the gradient of the matrix is missing.
    """
    shared = {}  # id of a layout -> whether several ranks store elements of one matrix
    for layout in {id(layout): layout for layout in layouts}.values():
        stored = [box for box in layout.boxes.values() if all(a < b for a, b in box)]
        counts = Counter(box[:-2] for box in stored)
        shared[id(layout)] = max(counts.values(), default=0) > 1
    exchanged = {m.param for b in buckets if b.route != "local" for m in b.matrices}
    return frozenset(exchanged.union(i for i, layout in enumerate(layouts) if shared[id(layout)]))


def bucket_sort_key(ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the key by which sets of ranks are ordered in a step, on every rank: large sets first.

    The buckets of a set of ranks are consecutive. All ranks issue the collectives of all sets in a
    common order; else two ranks would wait in different collectives and hang.
    """
    return -len(ranks), ranks


def _families(
    layouts: Sequence[Layout], of_state: Sequence[Sequence[Layout]], plain: str
) -> dict[Family, list[Matrix]]:
    """Return (route, ranks) -> matrices with pieces on the ranks, in order of parameters."""
    families: dict[Family, list[Matrix]] = {}
    # Thousands of parameters share a handful of layouts, whose boxes grow with the ranks. id of a
    # layout -> [(box of leading indices, [(unit, matrices of the unit's family)])]
    targets_of: dict[int, list] = {}
    for param, layout in enumerate(layouts):
        if id(layout) not in targets_of:
            # A family is looked up once: the hash of a tuple of thousands of ranks is slow
            targets_of[id(layout)] = [
                (lead, [(unit, families.setdefault(family, [])) for unit, family in of_units])
                for lead, of_units in _routes(layout, [some[param] for some in of_state], plain)
            ]
        for lead, targets in targets_of[id(layout)]:
            every_at = itertools.product(*(range(a, b) for a, b in lead))
            for at, (unit, matrices) in itertools.product(every_at, targets):
                shape, selected = layout.unit_shapes[unit], layout.selected_shapes[unit]
                matrices.append(Matrix(param, at, *shape, unit, selected))
    return families


def _routes(
    layout: Layout, of_state: Sequence[Layout], plain: str
) -> list[tuple[tuple, list[tuple[int, Family]]]]:
    """Return [(box of leading indices, [(unit, (route, ranks))])]: the family of each unit of the
    matrices in each box.

    Expert parallelism shards leading indices: experts on different ranks are different families.
    """
    ranks_of = defaultdict(list)
    for rank, box in layout.boxes.items():
        if all(a < b for a, b in box[:-2]):
            ranks_of[box[:-2]].append(rank)
    route = plain if layout.plain else "exchange"
    found = []
    for lead, ranks in ranks_of.items():
        ranks = tuple(sorted(ranks))
        if layout.unit_count > 1:
            storing = _whole_at(layout, of_state, ranks)
        else:
            # A single rank with elements owns its matrices. Otherwise ranks with empty shards take
            # part, too: they may own matrices.
            some = tuple(r for r in ranks if all(a < b for a, b in layout.boxes[r][-2:]))
            storing = {} if not some else {0: some if len(some) == 1 else ranks}
        units = [
            (unit, ("local" if len(ranks) == 1 else route, ranks))
            for unit, ranks in sorted(storing.items())
        ]
        found.append((lead, units))
    return found


def _whole_at(
    layout: Layout, of_state: Sequence[Layout], ranks: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """Return unit -> the ranks that step it: the ranks that store it, if each of these stores the
    whole unit; else all of `ranks`.

    A unit that lies whole on a rank, such as a head, is never sent to another owner. Units without
    elements are left out. `of_state`: a unit counts as whole only with all its state.
    """
    tensors = [layout, *of_state]
    needed = defaultdict(dict)  # unit -> rank -> elements of the unit, and of each of its states
    for kind, of_kind in enumerate(tensors):
        for rank in ranks:
            for unit, count in of_kind.unit_sizes(rank).items():
                needed[unit].setdefault(rank, [0] * len(tensors))[kind] = count
    found = {}
    for unit, stored in needed.items():
        whole = [math.prod(of_kind.unit_shapes[unit]) for of_kind in tensors]
        is_whole = all(counts == whole for counts in stored.values())
        if whole[0]:
            found[unit] = tuple(sorted(stored)) if is_whole else ranks
    return found


def _assign(
    families: Mapping[Family, list[Matrix]],
    layouts: Sequence[Layout],
    cost: Cost,
    loads: dict[frozenset[int], Counter],
) -> dict[Matrix, int]:
    """Return matrix -> owner rank, balanced over all shapes at once (load_balance.py); add the work
    to `loads`.

    The world of a layout is the set of all its ranks. Work of a world is balanced against earlier
    work of supersets only: other work is unknown to some ranks of the world, and all ranks must
    choose equal owners. Large worlds come first, so that small worlds can take their work into
    account. With state at the owner, all matrices of a parameter get a common owner, since the
    state is a single tensor.
    """
    owner_of: dict[Matrix, int] = {}
    worlds = defaultdict(list)  # world -> ((param, at, unit), allowed ranks, work, matrices)
    distinct = {id(layout): layout for layout in layouts}
    # One object for each set: a dict compares equal sets of thousands of ranks, one by one
    same: dict[frozenset[int], frozenset[int]] = {}
    world_of: dict[int, frozenset[int]] = {}  # id of a layout -> its world
    for key, layout in distinct.items():
        world = frozenset(layout.boxes)
        world_of[key] = same.setdefault(world, world)
    for (route, ranks), matrices in families.items():
        # The matrices of a parameter are consecutive in a family, as groupby needs
        for _, found in itertools.groupby(
            matrices, key=lambda m: m.param if route in OWNER_STATE_ROUTES else m
        ):
            together = list(found)  # have a common owner
            first = together[0]
            # LPT needs work > 0: else all matrices without cost would go to one rank
            work = sum(max(1, cost(*m.iterated_shape)) for m in together)
            worlds[world_of[id(layouts[first.param])]].append(
                ((first.param, first.at, first.unit), ranks, work, together)
            )
    for world in sorted(worlds, key=lambda world: (-len(world), sorted(world))):
        # Sorted by parameter: the order of families may depend on parameters of other worlds
        entries, base = sorted(worlds[world], key=itemgetter(0)), Counter()
        for superset in [ranks for ranks in loads if ranks >= world]:
            base.update(loads[superset])
        owners = assign(
            [(work, ranks) for _, ranks, work, _ in entries], {r: base[r] for r in sorted(world)}
        )
        added = loads.setdefault(world, Counter())
        for owner, (*_, work, together) in zip(owners, entries):
            owner_of.update(dict.fromkeys(together, owner))
            added[owner] += work
    return owner_of


def plan_chunks(
    shapes: Sequence[tuple[int, int]],
    ranks: tuple[int, ...],
    rank_bytes: int,
    inputs: ChunkPlanInputs,
) -> list[Bucket]:
    """Return the buckets of elementwise parameters (AdamW) with state at owners: the i-th rank owns
    the i-th part of the rows of each parameter.

    `shapes`: (rows, elements per row) of each parameter. A bucket takes a range of rows of every
    owner's part, see `Matrix`. `rank_bytes`: workspace bytes of a rank; a bucket has at least a row
    of each part.
    """
    buffer_bytes, scratch_bytes, fixed = _chunk_bytes(ranks, inputs)
    element = workspace_bytes(buffer_bytes, scratch_bytes)
    N = len(ranks)
    limit = (rank_bytes - workspace_bytes(fixed, fixed)) // element  # elements of a part
    buckets = [[]]
    for param, (rows, cols) in enumerate(shapes):
        first, last = 0, -(-rows // N) if cols else 0
        # A parameter without elements becomes a Matrix without rows, since the parameter's count of
        # steps must still advance
        buckets[-1] += [] if last else [Matrix(param, (0,), 0, 0)]
        while first < last:
            free = limit - sum(m.numel for m in buckets[-1])
            # An empty bucket takes a row even without a free element: else the loop would not end
            if free < cols and buckets[-1]:
                buckets.append([])
                continue
            count = min(max(free // cols, 1), last - first)
            buckets[-1].append(Matrix(param, (first,), count, cols))
            first += count
    sizes = [sum(m.numel for m in b) for b in buckets]
    route = "own_elementwise" if inputs.reduced else "reduce_elementwise"
    return [
        Bucket(
            route, ranks, tuple(b), (), None, (buffer_bytes * n + fixed, scratch_bytes * n + fixed)
        )
        for b, n in zip(buckets, sizes)
        if b
    ]


def _chunk_bytes(ranks: tuple[int, ...], inputs: ChunkPlanInputs) -> tuple[int, int, int]:
    """Return (bytes of the bucket buffer per element of a part, bytes of the shared scratch per
    element, bytes of each for any number of elements).
    """
    N = len(ranks)
    sent_in = N * inputs.gradient
    sent_out = N * inputs.weight - inputs.weight  # the owner keeps its own part
    stepped = inputs.stepped
    if inputs.reduced:
        # Send and receive buffers of the outbound all-to-all; the part's own gradient stands in
        # for the mean. The last number bounds the padding of parts to ALIGNMENT.
        return 2 * sent_out + stepped + inputs.gradient, 0, 4 * ALIGNMENT * (N + 3)
    # Both directions share two buffers, as large as the larger direction. The mean, in at least
    # fp32, is in the shared scratch.
    return (2 * max(sent_in, sent_out) + stepped, max(4, inputs.gradient), 3 * ALIGNMENT * (N + 3))


def chunks_along_backward(
    shapes: Sequence[tuple[int, int]], ranks: tuple[int, ...], inputs: ChunkPlanInputs, latency: int
) -> list[Bucket]:
    """Return `plan_chunks` in buckets for overlap_backward: small, last parameter first. `latency`:
    as in `along_backward`.
    """
    rank_bytes = _small_bucket_bytes(shapes, ranks, inputs, latency)
    return plan_chunks(shapes, ranks, rank_bytes, inputs)[::-1]


def chunks_along_forward(
    shapes: Sequence[tuple[int, int]],
    ranks: tuple[int, ...],
    inputs: ChunkPlanInputs,
    latency: int,
    rank_bytes: int,
) -> list[Bucket]:
    """Return `plan_chunks` in buckets for overlap_forward: small, first parameter first. `latency`,
    `rank_bytes`: as in `along_forward`.
    """
    rank_bytes = min(rank_bytes, _small_bucket_bytes(shapes, ranks, inputs, latency))
    return plan_chunks(shapes, ranks, rank_bytes, inputs)


def _small_bucket_bytes(
    shapes: Sequence[tuple[int, int]], ranks: tuple[int, ...], inputs: ChunkPlanInputs, latency: int
) -> int:
    """Return the `rank_bytes` with which `plan_chunks` makes about OVERLAP_BUCKETS buckets, or
    fewer buckets of at least `latency` bytes.
    """
    buffer_bytes, scratch_bytes, fixed = _chunk_bytes(ranks, inputs)
    numel = sum(-(-rows // len(ranks)) * cols for rows, cols in shapes)
    most = max(-(-numel // OVERLAP_BUCKETS), latency // (len(ranks) * inputs.gradient))
    return workspace_bytes(fixed, fixed) + workspace_bytes(buffer_bytes, scratch_bytes) * most


def digest(buckets: Sequence[Bucket], layouts: Sequence[Layout], *more: object) -> int:
    """Return a 56-bit number that differs between ranks with different plans (7 bytes of SHA-256).
    `more`: further values to compare, by `repr`.
    """
    # Parameters enter by their order, not by their indices: a rank may have parameters in between
    # that the other ranks of the buckets do not know
    place = {
        param: i for i, param in enumerate(sorted({m.param for b in buckets for m in b.matrices}))
    }
    text = repr(
        [
            (
                b.route,
                b.ranks,
                b.owners,
                [(place[m.param], m.at, m.unit, m.rows, m.cols, m.selected) for m in b.matrices],
            )
            for b in buckets
        ]
    ) + repr(more)
    text += repr([layouts[m.param].digest for b in buckets for m in b.matrices])
    return _text_digest(text)


def digest_int(value: object) -> int:
    """Return a 56-bit integer from the SHA-256 of the value's repr, for comparisons of ranks."""
    return _text_digest(repr(value))


def _text_digest(text: str) -> int:
    """Return the first 7 bytes of the SHA-256 of a text, which fit into int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

"""`HeadClipping`: QK-clip as a hook of a step.

Before the buckets the maxima of all ranks are compared in one all-reduce, and a factor for each
stored row is computed on the device. After the buckets, the local weights are multiplied by the
factors of their rows. Weights of every layout get equal bits, since a row has one factor on all
ranks. Nothing waits for the device.

[Note: time of the collective] The all-reduce comes before the buckets, in a group that is never
dedicated: with overlap_backward ranks may have begun different numbers of buckets in dedicated
groups, but all model collectives of backward were issued.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..communication.nonfinite import NonfiniteFlags, reduce_maximum
from ..communication.process_groups import ProcessGroups, Ranks, world_now
from ..kernels.backend import use_triton
from ..kernels.elementwise.weight_update import SCALED_DTYPES, ScaledWeights
from ..kernels.weights.split import join_into, split_into
from ..params import errors
from ..params.config import MuonConfig
from ..params.dtensor import is_dtensor, local_of
from ..params.layout import coordinates_of_parts, ranks_of, stored_ranges, this_rank
from ..pipeline import BucketUpdate, Job, StepHook
from ..planning.plan import bucket_sort_key
from ..planning.planner import StoreOfPlan
from .clip import QKClip
from .largest import LargestLogits, runs
from .layers import NONE, ROOT, SHARED_KEY, SHARED_QUERY, WHOLE, AttentionLayer


@dataclass
class ClippedWeight:
    """The local part of a parameter with queries or keys.

    `local`: the stored elements. `factors`: fp32 view of the factors of all rows, (rows, 1),
    (1, columns) or (rows,). `store`, `number`: of the parameter in the bound step. `rest`: of a
    split weight, shaped like `local`; else None.
    """

    local: torch.Tensor
    factors: torch.Tensor
    store: StoreOfPlan
    number: int
    rest: torch.Tensor | None = None

    def scale(self) -> None:
        """Multiply a split weight by `factors`, in fp32."""
        wide = torch.empty_like(self.local, dtype=torch.float32)
        join_into(wide, self.local, self.rest)
        split_into(wide.mul_(self.factors), self.local, self.rest)


class HeadClipping(StepHook):
    """Scales the weights of heads with large logits, see [Note: time of the collective].

    Weights that the step leaves out (frozen, or without a gradient on any rank, which
    `MissingGradients` restores) are not scaled.
    """

    def __init__(
        self,
        clip: QKClip,
        groups: Sequence[dict],
        stores: Sequence[StoreOfPlan],
        options: MuonConfig,
        options_by_group: Sequence[MuonConfig],
        process_groups: ProcessGroups,
        nonfinite: NonfiniteFlags | None,
        device: torch.device,
    ) -> None:
        """`groups`: live parameter groups. `options_by_group`: `options` of each, with its process
        group. `nonfinite`: flags of the step; a step skipped as a whole clips nothing.

        Raises ValueError if ranks would clip by maxima of their own batches only;
        NotImplementedError, naming the layer, if weights of a layer are on different ranks.
        """
        self.clip = clip
        self.options = options
        self.options_by_group = options_by_group
        self.process_groups = process_groups
        skips_whole_step = nonfinite is not None and nonfinite.skips_whole_step
        self.whole_step = nonfinite if skips_whole_step else None
        self.device = device
        self.in_turn = options.overlap_forward  # each weight is scaled as soon as it is written
        self.parameters = {
            name: {key: clip.param(groups, key) for key in layer.weights}
            for name, layer in clip.layers.items()
        }
        self._place_heads()
        self._place_rows(stores)
        self.turns: dict[int, list[int]] = {}  # id of an update -> indices of weights it writes
        self.writes: list[int] = []  # weight -> number of updates that write it
        self.unwritten: list[int] = []  # weight -> updates of this step that are still to come
        self.unscaled: set[int] = set()  # indices of weights, with `in_turn` in this step
        # See `_connect`: the tensor and the number of layers for which the views were made
        self.connected: tuple[torch.Tensor, int] | None = None
        self.targets: list[torch.Tensor] = []  # views of `values`
        self.sources: list[torch.Tensor] = []  # for each target, the tensor copied in each step

    def _place_heads(self) -> None:
        """Place the maxima of all layers in a buffer, layers of equal ranks beside each other: the
        maxima of all heads of these layers, then as many flags.
        """
        layers_of: dict[Ranks, list[str]] = {}
        for name in self.clip.layers:
            layers_of.setdefault(self._ranks_of(name), []).append(name)
        self.segments: dict[Ranks, slice] = {}  # of `values`
        self.first: dict[str, int] = {}  # layer -> index of the first head in `heads`
        self.first_key: dict[str, int] = {}  # layer -> index of the first key head, of shared keys
        maxima, flags, starts = [], [], {}
        at = keys = 0
        for ranks in sorted(layers_of, key=bucket_sort_key):
            heads = sum(self.clip.layers[name].heads for name in layers_of[ranks])
            self.segments[ranks] = slice(at, at + 2 * heads)
            for name in layers_of[ranks]:
                self.first[name] = len(maxima)
                starts[name] = at, at + heads
                count = self.clip.layers[name].heads
                maxima.extend(range(at, at + count))
                flags.extend(range(at + heads, at + heads + count))
                at += count
            at += heads
        members = []  # of each shared key head: indices of its query heads
        for name, layer in self.clip.layers.items():
            self.first_key[name] = keys
            if layer.has_shared_keys and self.clip.shared_keys == "shrink":
                each, first = layer.heads // layer.kv_heads, self.first[name]
                members += [
                    range(first + key * each, first + (key + 1) * each)
                    for key in range(layer.kv_heads)
                ]
                keys += layer.kv_heads
        self.starts = starts  # layer -> (index in `values` of its maxima, of its flags)
        self.heads_index = self._indices([*maxima, *flags])
        # Padded: layers may have key heads of different numbers of query heads
        most = max(map(len, members), default=0)
        padded = [[*heads, *[heads[0]] * (most - len(heads))] for heads in members]
        self.members = self._indices(padded)
        key_of = [0] * len(maxima)
        for key, heads in enumerate(members):
            for head in heads:
                key_of[head] = key
        self.key_of = self._indices(key_of)
        initial = torch.zeros(at, dtype=torch.float32, device="cpu")
        initial[maxima] = -math.inf
        self.initial = initial.to(self.device)
        self.values = self.initial.clone()
        self._make_buffers(len(maxima))

    def _make_buffers(self, H: int) -> None:
        """Allocate the tensors that a step computes for `H` heads, one for each launch."""
        shared = len(self.members)
        self.heads = torch.zeros(2 * H, dtype=torch.float32, device=self.device)
        self.maxima, self.flags = self.heads.view(2, H)
        self.maxima.fill_(-math.inf)
        self.marked = torch.zeros(2, H, dtype=torch.bool, device=self.device)
        self.is_above, self.is_broken = self.marked  # the threshold; with NaN or Inf
        self.marked_counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.results = self.maxima, *self.marked_counts
        sizes = [H, H, H * bool(shared), shared, 1]  # ROOT, WHOLE, SHARED_QUERY, SHARED_KEY, 1
        self.table = torch.ones(sum(sizes), dtype=torch.float32, device=self.device)
        self.factors = self.table.split(sizes)
        self.threshold = self._scalar()

    def _scalar(self) -> tuple[float, torch.Tensor]:
        """The threshold, also as a tensor on the CPU, which kernels take as a number."""
        threshold = self.clip.threshold
        return threshold, torch.tensor(threshold, dtype=torch.float64, device="cpu")

    def _indices(self, values: list) -> torch.Tensor:
        """int64 on the device."""
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.device)

    def _ranks_of(self, name: str) -> Ranks:
        """The ranks that hold the weights of a layer. Raises as the constructor."""
        found = set()
        is_chosen = False  # whether a parameter group names the ranks of its plain parameters
        for key, param in self.parameters[name].items():
            group = self.options_by_group[self.clip.group_index(key)].process_group
            is_chosen |= not is_dtensor(param) and group is not self.options.process_group
            if is_dtensor(param):
                found.add(tuple(ranks_of(param.device_mesh)))
            elif group is not None:
                found.add(tuple(dist.get_process_group_ranks(group)))
            else:
                found.add((this_rank(),))
        if len(found) > 1:
            raise NotImplementedError(
                f"layer {name} of qk_clip has parameters on different ranks {sorted(found)}: shard "
                "all of them over one mesh, give their parameter groups one process_group, or "
                "leave the layer out"
            )
        (ranks,) = found
        is_alone = len(ranks) == 1 and self.clip.process_group is None and _world_size() > 1
        # A parameter group with None in an optimizer with a process group has weights of this rank
        if is_alone and not is_chosen:
            raise ValueError(
                f"layer {name} of qk_clip has parameters that each process steps alone, and the "
                "processes would scale their copies by the maxima of their own batches: pass the "
                "ranks with copies as process_group of the parameter group, the optimizer or QKClip"
            )
        return ranks

    def _place_rows(self, stores: Sequence[StoreOfPlan]) -> None:
        """Find the factor of each stored row of all weights."""
        known = {id(p): (store, i) for store in stores for i, p in enumerate(store.params)}
        starts = [0, *itertools.accumulate(map(len, self.factors))]
        # Without shared keys that are scaled, all factors of shared queries are those of WHOLE
        of_queries = starts[2] if len(self.members) else starts[1]
        found, rows = [], []
        count = 0
        for name, layer in self.clip.layers.items():
            first, first_key = self.first[name], self.first_key[name]
            # Index in `table` of the layer's first factor, by kind
            first_of = {
                ROOT: first,
                WHOLE: starts[1] + first,
                SHARED_QUERY: of_queries + first,
                SHARED_KEY: starts[3] + first_key,
                NONE: starts[4],
            }
            start_of = torch.tensor([first_of[kind] for kind in sorted(first_of)], device="cpu")
            for key, param in self.parameters[name].items():
                with errors.during(f"layer {name} of qk_clip, parameter {key}"):
                    kinds, heads = self._stored_slots(layer, key, param)
                if id(param) in known and bool((kinds != NONE).any()):
                    dim = layer.weights[key].dim
                    found.append((param, dim, slice(count, count + len(kinds))))
                    rows.append(start_of[kinds] + heads)
                    count += len(kinds)
        self.rows = torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *rows])
        self.rows = self.rows.to(self.device)
        self.row_factors = torch.ones(count, dtype=torch.float32, device=self.device)
        self.weights = []
        for param, dim, part in found:
            local = local_of(param)
            shape = [1] * local.ndim
            shape[dim] = -1
            factors = self.row_factors[part].view(shape)
            store, number = known[id(param)]
            rest = store.rest_of(number)
            self.weights.append(ClippedWeight(local, factors, store, number, rest))
        self.split = [weight for weight in self.weights if weight.rest is not None]
        firsts = [(part.start, dim) for _, dim, part in found]
        self._bind_scaling(firsts)

    def _bind_scaling(self, firsts: Sequence[tuple[int, int]]) -> None:
        """Sort the weights that `after_buckets` scales together: by Triton (`launches`), or by
        torch (`locals`, `local_factors`). `firsts`: of each weight, see `ScaledWeights`.
        """
        may_use_triton = use_triton(self.device) and not self.in_turn
        by_triton, by_torch = [], []
        for weight, first in zip(self.weights, firsts):
            if weight.rest is None and may_use_triton and weight.local.dtype in SCALED_DTYPES:
                by_triton.append((weight.local, first))
            elif weight.rest is None:
                by_torch.append(weight)
        self.launches = []
        if by_triton:
            self.launches.append(ScaledWeights(*zip(*by_triton), self.row_factors))
        self.locals = [weight.local for weight in by_torch]
        self.local_factors = [weight.factors for weight in by_torch]

    def _stored_slots(self, layer: AttentionLayer, key: str, param: torch.Tensor) -> torch.Tensor:
        """`AttentionLayer.slots` of the rows (or columns) that this rank stores, in memory order:
        (2, rows).
        """
        dim = layer.weights[key].dim
        slots = layer.slots(key, param.shape[dim], self.clip.shared_keys)
        stored = [slots[:, start:stop] for start, stop in stored_ranges(param, dim)]
        return torch.cat([slots[:, :0], *stored], dim=1)

    def bind(self, jobs: Sequence[Job]) -> None:
        """Count the updates of `jobs` that write each weight."""
        index = {(id(w.store), w.number): i for i, w in enumerate(self.weights)}
        self.writes = [0] * len(self.weights)
        for update, _ in jobs if self.in_turn else ():
            if update.store is None:
                continue
            numbers = range(len(update.store.params))
            if update.bucket is not None:
                numbers = sorted({matrix.param for matrix in update.bucket.matrices})
            written = [index.get((id(update.store), number)) for number in numbers]
            self.turns[id(update)] = [i for i in written if i is not None]
            for i in self.turns[id(update)]:
                self.writes[i] += 1

    def before_buckets(self, found_inf: torch.Tensor | float | None) -> None:
        """Compare the maxima of the ranks, and compute the factors of all rows. Collective."""
        taken = self.clip.taken_on(self.values.device)
        known = self.connected
        if known is None or known[0] is not taken.values or known[1] != len(self.clip.counts):
            self._connect(taken)
        torch._foreach_copy_(self.targets, self.sources)
        common = self.process_groups.shared_groups()
        for ranks, segment in self.segments.items():
            groups = [common.get_or_create(ranks)] if len(ranks) > 1 else []
            if self.clip.process_group is not None:
                groups.append(self.clip.process_group)
            for group in groups:
                reduce_maximum(self.values[segment], group)
        self._compute_factors()
        if len(self.rows):
            torch.index_select(self.table, 0, self.rows, out=self.row_factors)
        self.unwritten = list(self.writes)
        if self.in_turn:
            self.unscaled = set(range(len(self.weights)))

    def _connect(self, taken: LargestLogits) -> None:
        """Set `targets` and `sources`, the copies that fill `values` before the ranks compare:
        maxima of this rank at the places of its heads, and `initial` elsewhere. Raises ValueError
        as `_first_head`.
        """
        size, total = taken.values.numel(), len(self.values)
        origins = [*range(size, size + total)]  # in `taken.values`, followed by `initial`
        for name, count in list(self.clip.counts.items()):
            try:
                first = _first_head(self.clip, name, self.parameters[name], count)
            except ValueError:
                self.clip.forget(name)
                raise
            for row, start in enumerate(self.starts[name]):
                at = row * (size // 2) + taken.places[name]
                origins[start + first : start + first + count] = range(at, at + count)
        self.targets, self.sources = [], []
        flat = taken.values.view(-1)
        for at, origin, count in runs(origins, border=size):
            source = flat[origin:] if origin < size else self.initial[origin - size :]
            self.targets.append(self.values[at : at + count])
            self.sources.append(source[:count])
        self.connected = taken.values, len(self.clip.counts)

    def _compute_factors(self) -> None:
        """Compute the factors of all heads, in `table`. Gives the maxima to the clip."""
        if self.threshold[0] != self.clip.threshold:
            self.threshold = self._scalar()
        threshold, tau = self.threshold
        torch.index_select(self.values, 0, self.heads_index, out=self.heads)
        torch.gt(self.maxima, threshold, out=self.is_above)
        torch.gt(self.flags, 0, out=self.is_broken)
        if self.whole_step is not None and self.whole_step.count:
            self.is_above &= self.whole_step.flags[0] == 0
        torch.sum(self.marked, 1, out=self.marked_counts)
        self.clip.set_results(self.results, self.first)
        root, whole, queries, keys, one = self.factors
        torch.div(tau, self.maxima, out=whole)
        torch.where(self.is_above, whole, one, out=whole)
        torch.sqrt(whole, out=root)
        if len(self.members):
            torch.amin(root[self.members], 1, out=keys)
            torch.div(whole, keys[self.key_of], out=queries).clamp_(max=1.0)

    def bucket_written(self, update: BucketUpdate) -> None:
        """With overlap_forward: scale the weights that no later update of this step writes, before
        the event that readers wait for.
        """
        ready = []
        for i in self.turns.get(id(update), ()):
            self.unwritten[i] -= 1
            weight = self.weights[i]
            # A missing gradient: the weight may be restored after the buckets
            if not self.unwritten[i] and weight.number not in weight.store.missing:
                ready.append(i)
        self._scale(ready)

    def after_buckets(self) -> None:
        """Scale all remaining weights."""
        if self.in_turn:
            return self._scale(sorted(self.unscaled))
        for launch in self.launches:
            launch()
        if self.locals:
            torch._foreach_mul_(self.locals, self.local_factors)
        for weight in self.split:
            weight.scale()

    def _scale(self, indices: Sequence[int]) -> None:
        """Multiply weights by the factors of their rows, in fp32, rounded once."""
        weights = [self.weights[i] for i in indices]
        if whole := [weight for weight in weights if weight.rest is None]:
            torch._foreach_mul_([w.local for w in whole], [w.factors for w in whole])
        for weight in weights:
            if weight.rest is not None:
                weight.scale()
        self.unscaled.difference_update(indices)


def _world_size() -> int:
    """Number of processes of torch.distributed; 1 without."""
    return 1 if world_now() is None else dist.get_world_size()


def _first_head(clip: QKClip, name: str, params: Mapping[str, torch.Tensor], count: int) -> int:
    """The first of the `count` heads of a layer for which a rank gives maxima.

    Fewer heads than the layer has are those of the rank's part of a mesh dim that shards heads
    (TP). Raises ValueError if the mesh dim cannot be told.
    """
    layer: AttentionLayer = clip.layers[name]
    if count == layer.heads:
        return 0
    key = next(key for key, parts in layer.weights.items() if "q" in parts.roles)
    param, dim = params[key], layer.weights[key].dim
    found = coordinates_of_parts(param, dim, layer.heads // count, clip.heads_dim)
    if len(found) != 1:
        raise ValueError(
            f"layer {name} of qk_clip has {layer.heads} heads, and this rank gave maxima of "
            f"{count}: {len(found)} mesh dims shard its queries into {layer.heads // count} parts. "
            "Give the maxima of all heads, or say which dim shards heads: "
            'QKClip(heads_dim="tp") for a mesh dim of this name'
        )
    return found[0] * count

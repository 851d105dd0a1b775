"""Comparison of plans between ranks before the first step, so that a difference raises an error
instead of a hang.

`check_plans` compares a row of digests per rank, never objects, and creates the process groups of
the plans. Also compares first elements of replicated weights and gradients, and warns of
differences.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..kernels import backend
from ..kernels.backend import triton_version, use_triton
from ..params import errors
from ..params.checks.group_keys import OPTIONAL_KEYS
from ..params.config import MuonConfig
from ..params.dtensor import local_of
from ..params.errors import first_few, fsdp_names, shortened, warn_caller
from ..params.layout import this_rank
from ..params.units import NOT_VIEWABLE, is_viewable, shapes_of
from ..planning.plan import bucket_sort_key, digest, digest_int
from ..planning.planner import Plan
from ..rules.elementwise import elementwise_of
from ..rules.muon import comparable_scale
from ..rules.rule import rule_of
from .process_groups import ProcessGroups, Ranks, gather_integers

# Group options in the order of comparison; the first difference is reported. AdamW groups derive
# `momentum` from `betas`, so `betas` comes first.
GROUP_KEYS = (
    "use_muon",
    "lr",
    "weight_decay",
    "decay",
    "betas",
    "momentum",
    "momentum_form",
    "rounding",
    "rounding_seed",
    "rounding_step",
    "master_weights",
    "state_dtype",
    "momentum_steps",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
    "split",
    "transposed",
    "rule",
    "beta2",
    "rule options",
)
# Fields of MuonConfig. `unscale_in_step` last: FACTS gives it a longer text
OPTION_NAMES = (
    "grads_are_reduced",
    "shard_state",
    "state_at_owners",
    "state_dtype",
    "wire_dtype",
    "ns_dtype",
    "nonfinite",
    "capturable",
    "overlap_backward",
    "overlap_forward",
    "unscale_in_step",
)
UNSCALING = (
    "unscale_in_step, which None has each rank decide by its own parameters (pass True or False)"
)
# Names in the error message, in the order of the digests of `_fact_digests`
COMPARED_FACTS = (
    "version of the package",
    "version of torch",
    "device, OPTIMIZER_KERNELS or OPTIMIZER_TILES",
    "version of Triton",
    *OPTION_NAMES[:-1],
    UNSCALING,
    "qk_clip",
    "number of parameter groups",
    *(f"group option {key}" for key in GROUP_KEYS),
    "number of parameters",
    "parameters",
    "buckets (workspace_bytes, or GPUs of other memory)",
)
# The row of integers that each rank sends. The last two may differ between ranks:
# `_count_with_state` and `_first_not_viewable`
FACTS = (*COMPARED_FACTS, "number of parameters with state", "first parameter not viewable")
COMPARED_ELEMENTS = 4  # first elements of a replica that ranks compare
TOLERANCE = 1e-3  # relative difference above which replicas count as different


def check_plans(
    plans: list[Plan], options: MuonConfig, process_groups: ProcessGroups, state: Mapping
) -> list[Callable[[], None]]:
    """Compare plans over every set of ranks with common parameters, and create their process
    groups. Raises RuntimeError if ranks differ, and NotImplementedError if some rank has strides
    of a parameter that its split cannot view. Warns if only some ranks have `state`, the
    optimizer's before missing state is created.

    Returns comparisons to call in the next step, collectively: of gradients, if all gradients are
    zero in a step with lr 0, by which torch.distributed.checkpoint creates state.

    Collective. Ranks with common parameters call the function before any other collective; larger
    sets of ranks come first.
    """
    sets = [_rank_sets(plan) for plan in plans]
    known = _fsdp_names(plans)
    deferred = []
    # Sorted alike on all ranks, larger sets first: ranks in several sets meet in a common order
    for ranks in sorted(set().union(*sets), key=bucket_sort_key):
        members = [(plan, found[ranks]) for plan, found in zip(plans, sets) if ranks in found]
        params = [
            entry
            for plan, numbers in members
            for entry in _param_digests(plan, sorted(numbers), known)
        ]
        digests, values = _fact_digests(ranks, members, params, options)
        facts = [*digests, _count_with_state(members, state), _first_not_viewable(members)]
        with errors.during(f"the comparison of plans of ranks {ranks}"):
            device = local_of(members[0][0].params[0]).device
            # In a shared group: dedicated groups exist only with overlap, which may be on for some
            # ranks only, and the comparison has to find such a difference
            common = process_groups.shared_groups()
            group = common.create_together(ranks, common.find_any_order(ranks), device)
            rows = gather_integers(facts, group, device)
            _raise_if_different(rows, values, params, group, device)
            *_, with_state, not_viewable = zip(*rows)
            _raise_if_not_viewable(not_viewable, params, group)
            _warn_of_missing_state(with_state, len(params), group)
            deferred += _compare_replicas(members, known, options, group, device)
            process_groups.reuse_idle(ranks, group, device)
            process_groups.create_together(ranks, group, device)
    for plan in plans:
        # Only for parameters of this rank alone: all others have passed `_raise_if_not_viewable`
        for number in range(len(plan.params)):
            plan.check_strides(number)
    for ranks in sorted(
        {b.ranks for plan in plans for b, _ in plan.rank_plans or () if b.route != "local"},
        key=bucket_sort_key,
    ):
        with errors.during(f"the first exchange of ranks {ranks}"):
            # Now, while no collective of a step is in flight
            process_groups.connect_pairs(ranks, local_of(plans[0].params[0]).device)
    return deferred


def _rank_sets(plan: Plan) -> dict[Ranks, set[int]]:
    """Return {ranks: indices of parameters for which the ranks communicate}."""
    sets = {}
    for number in plan.on_several_ranks:
        sets.setdefault(plan.layouts[number].ranks, set()).add(number)
    for bucket, _ in plan.rank_plans or ():
        if bucket.route != "local":
            sets.setdefault(bucket.ranks, set()).update(m.param for m in bucket.matrices)
    return {ranks: numbers for ranks, numbers in sets.items() if len(ranks) > 1}


def _groups_of(members: list[tuple[Plan, set[int]]]) -> list[dict]:
    """Return the live groups of the parameters that ranks have in common: a plan may hold further
    groups, unknown to some of the ranks.
    """
    found = {}
    for plan, numbers in members:
        for number in sorted(numbers):
            group = plan.group_at(number)
            found[id(group)] = group
    return list(found.values())


def _fact_digests(
    ranks: Ranks,
    members: list[tuple[Plan, set[int]]],
    params: list[tuple[str, int]],
    options: MuonConfig,
) -> tuple[list[int], list[object]]:
    """Return an integer for each of COMPARED_FACTS, and the values of the first of them, to be
    shown if they differ. `members`: [(plan, indices of the parameters that `ranks`
    have in common)].
    """
    plans = [plan for plan, _ in members]
    device = local_of(plans[0].params[0]).device
    buckets = [
        digest(
            [b for b, _ in plan.rank_plans or () if b.ranks == ranks and b.route != "local"],
            plan.layouts,
        )
        for plan in plans
    ]
    clip = options.qk_clip
    options = [str(getattr(options, key)) for key in OPTION_NAMES]
    groups = _groups_of(members)
    shared = [plan.params[number] for plan, numbers in members for number in numbers]
    by_group = [[_group_option(group, key, shared) for group in groups] for key in GROUP_KEYS]
    kernels = (
        device.type,
        use_triton(device),
        backend.bit_relevant_settings(),
        sorted({plan.cost_model_key for plan in plans} - {""}),
    )
    values = [
        _sources(),
        torch.__version__,
        kernels,
        triton_version(device),
        *options,
        clip and clip.digest_text(plan.names[i] for plan, numbers in members for i in numbers),
        len(groups),
        *by_group,
    ]
    digests = [
        *map(digest_int, values),
        len(params),
        digest_int([number for _, number in params]),
        digest_int(buckets),
    ]
    return digests, [*values, len(params)]


def _first_not_viewable(members: list[tuple[Plan, set[int]]]) -> int:
    """Return the place, counted from 1, of the first parameter with strides that its split cannot
    view on this rank; 0 for none. `members`: as in `_fact_digests`.
    """
    viewable = [
        is_viewable(plan.split(number), plan.params[number])
        for plan, numbers in members
        for number in sorted(numbers)
    ]
    return 0 if all(viewable) else viewable.index(False) + 1


def _fsdp_names(plans: list[Plan]) -> dict[int, str]:
    """Return {id: name} of parameters in groups without names, if FSDP2 knows a name."""
    unnamed = [
        id(p)
        for plan in plans
        for i, p in enumerate(plan.params)
        if not plan.group_at(i).get("param_names")
    ]
    known = fsdp_names() if unnamed else {}
    return {key: known[key] for key in unnamed if key in known}


def _param_digests(plan: Plan, numbers: list[int], known: dict[int, str]) -> list[tuple[str, int]]:
    """Return [(description for messages, digest)] of the parameters with indices `numbers`. Digests
    include names given by the user or FSDP2.
    """
    found = []
    for i in numbers:
        given = _given_name(plan, i, known)
        name = f"{given or plan.names[i]} of shape {tuple(plan.params[i].shape)}"
        found.append((name, digest_int((given, *_signature(plan, i)))))
    return found


def _given_name(plan: Plan, number: int, known: dict[int, str]) -> str | None:
    """Return the name that the user or FSDP2 gave to a parameter. Names that this package made up
    (#0, #1) count positions only, and are not compared. `known`: result of `_fsdp_names`.
    """
    is_named = plan.group_at(number).get("param_names")
    return plan.names[number] if is_named else known.get(id(plan.params[number]))


def _signature(plan: Plan, number: int) -> tuple:
    """Return dtype, layout and mismatched placements of the gradient: parameters with equal
    signatures could be confused by ranks.
    """
    return plan.params[number].dtype, plan.layouts[number].digest, plan.mismatched.get(number)


def _group_option(group: dict, key: str, params: list[torch.Tensor]) -> object:
    """Return a group option in a form with equal text for equal values; `key`: one of GROUP_KEYS.
    `params`: that ranks have in common.
    """
    if key == "rule options":
        keys = (rule_of if group["use_muon"] else elementwise_of)(group).options
        return [(k, _normalized(group.get(k))) for k in sorted(keys)]
    value = group.get(key, OPTIONAL_KEYS.get(key))
    if key == "adjust_lr_fn" and callable(value):
        return comparable_scale(value, shapes_of(group, params)) if group["use_muon"] else None
    return _normalized(value)


def _normalized(value: object) -> object:
    """Return a group option in a form with equal text for equal values: lr may be a tensor, betas a
    list.
    """
    if isinstance(value, torch.Tensor):
        return float(value)
    return [_normalized(x) for x in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def _sources() -> str:
    """Return a digest of the package's Python sources, which determine the bits of a step."""
    folder = Path(__file__).parent.parent  # the package
    texts = [
        (str(path.relative_to(folder)), path.read_bytes())
        for path in folder.rglob("*.py")
        if path.name != "_ops.py"
    ]
    return hashlib.sha256(repr(sorted(texts)).encode()).hexdigest()


def _raise_if_different(
    rows: list[list[int]],
    values: list[object],
    params: list[tuple[str, int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise RuntimeError with the first of COMPARED_FACTS that differs between the ranks of
    `group`, and its value of `values` on this rank. `rows`: of each rank, in the order of FACTS.
    Collective if the ranks differ in their parameters.
    """
    ranks = dist.get_process_group_ranks(group)
    for index, fact in enumerate(COMPARED_FACTS):
        odd = _minority(ranks, [row[index] for row in rows])
        # All ranks have equal rows, so that all take part in the second gather or none does
        if odd and fact == "parameters":
            fact = _first_difference(params, group, device)
        elif odd and index < len(values):
            by_group = " by group" * (fact.startswith("group option") and len(values[index]) > 1)
            fact += f"; on this rank{by_group}: {_shown(values[index])}"
        if odd:
            usual = [rank for rank in ranks if rank not in odd]
            raise RuntimeError(
                f"rank {this_rank()}: the ranks have different plans. Ranks {odd} and ranks "
                f"{usual} differ in: {fact}. Build the optimizer alike on all ranks"
            )


def _raise_if_not_viewable(
    not_viewable: Sequence[int], params: list[tuple[str, int]], group: dist.ProcessGroup
) -> None:
    """Raise NotImplementedError, naming the parameter, if a rank cannot view a parameter by its
    split. `not_viewable`: `_first_not_viewable` of each rank.
    """
    # A rank with an empty shard can view any strides, but must raise together with the other ranks
    if not any(not_viewable):
        return
    first = min(filter(None, not_viewable))
    ranks = dist.get_process_group_ranks(group)
    where = ", ".join(str(rank) for rank, number in zip(ranks, not_viewable) if number == first)
    refusal = NOT_VIEWABLE.format(f"as on ranks {where}")
    raise NotImplementedError(f"parameter {params[first - 1][0]}: {refusal}")


def _warn_of_missing_state(
    counts: Sequence[int], param_count: int, group: dist.ProcessGroup
) -> None:
    """Warn on the lowest rank if only some ranks have state. `counts`: `_count_with_state` of each
    rank. `param_count`: number of the parameters that the ranks share.
    """
    ranks = dist.get_process_group_ranks(group)
    if not all(counts) and any(counts) and this_rank() == min(ranks):
        without = [rank for rank, count in zip(ranks, counts) if not count]
        warn_caller(
            f"ranks {first_few(without)} have no state of any of the {param_count} "
            f"parameters that ranks {first_few(ranks)} share, and other ranks have state of "
            f"{max(counts)}: there momentum and averages begin at zero, and not on the other "
            "ranks. Load a checkpoint on all ranks"
        )


def _count_with_state(members: list[tuple[Plan, list[int]]], state: Mapping) -> int:
    """Return the number of parameters with state. State that owners keep does not count: only some
    ranks have it, and the creation of state compares it. `members`: as in `_fact_digests`.
    """
    return sum(
        bool(state.get(plan.params[i]))
        for plan, numbers in members
        if plan.state_rows is None and plan.matrix_owners is None
        for i in numbers
    )


def _shown(value: object) -> str:
    """A value of `_fact_digests` as text; of a list with one entry, the entry."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return shortened(one if isinstance(one, str) else repr(one))


def _minority(ranks: list[int], values: list) -> list[int]:
    """Return the ranks whose value differs from the majority. On a tie the first rank's value
    counts as the majority.
    """
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    return [rank for rank, value in zip(ranks, values) if value != usual]


def _first_difference(
    params: list[tuple[str, int]], group: dist.ProcessGroup, device: torch.device
) -> str:
    """Return a description of the first parameter that differs between ranks. Collective. The lists
    of all ranks have equal lengths, and all ranks know that the lists differ.
    """
    rows = gather_integers([number for _, number in params], group, device)
    place = next(i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1)
    return (
        f"parameters; the first is number {place}, here {params[place][0]} (order, shape, dtype, "
        "placement, or that of its gradient)"
    )


@dataclass
class Replicated:
    """A parameter shared by several ranks, with the values to compare."""

    name: str  # for messages
    identity: str | None  # name that the user or FSDP2 gave; None without
    signature: tuple  # see `_signature`
    is_sent: bool  # pieces are sent to other ranks, which find them by the order of parameters
    # First elements, fp32; None if ranks need not have equal values
    weight: torch.Tensor | None
    gradient: torch.Tensor | None

    def key(self) -> object:
        """Return the name, or without name a digest of the first elements; equal for all parameters
        without both.
        """
        rows = [None if row is None else row.tolist() for row in (self.weight, self.gradient)]
        return self.identity or digest_int(rows)


def _compare_replicas(
    members: list[tuple[Plan, set[int]]],
    known: dict[int, str],
    options: MuonConfig,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Callable[[], None]]:
    """Compare the first elements of replicated weights and reduced gradients. Collective.

    `members`: [(plan, indices of parameters shared by the ranks of `group`)]. `known`: {id: name}
    of parameters without a name from the user. Raises RuntimeError if ranks have unnamed parameters
    in different orders. The lowest rank warns of other differences, and of parameters that ranks
    could confuse without notice. Returns the comparison of gradients for a later step if all
    gradients are zero and each lr is 0, else [].
    """
    replicated = _all_replicated(members, known, options)
    # Weights and gradients are compared in a single all-reduce
    values = [c.weight for c in replicated] + [c.gradient for c in replicated]
    extremes = _extremes(values, group, device)
    weights = extremes[: len(replicated)]
    gradients = extremes[len(replicated) :]
    # Weights in different orders differ as well, which is an error and not a warning
    if any(map(_differs, weights)):
        _refuse_order(replicated, group, device)
    ranks = dist.get_process_group_ranks(group)
    # All ranks have equal extremes: a single warning is enough
    if this_rank() == min(ranks):
        _warn_of_weights(_only_different(replicated, weights), ranks)
        _warn_of_gradients(_only_different(replicated, gradients), ranks)
        _warn_of_order(replicated, ranks)
    compared = [pair for pair in gradients if pair is not None]
    is_lr_zero = all(_normalized(group["lr"]) == 0 for group in _groups_of(members))
    if not compared or not is_lr_zero:
        return []
    if any((most > 0).any() or (least < 0).any() for most, least in compared):
        return []
    # torch.distributed.checkpoint steps with lr 0 and zero gradients to create state: gradients are
    # compared in a later step
    return [functools.partial(_compare_gradients, members, known, options, group, device)]


def _compare_gradients(
    members: list[tuple[Plan, set[int]]],
    known: dict[int, str],
    options: MuonConfig,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compare the first elements of the current gradients, as `_compare_replicas` does."""
    replicated = _all_replicated(members, known, options)
    with errors.during("the comparison of gradients of which ranks hold copies"):
        gradients = _extremes([c.gradient for c in replicated], group, device)
    ranks = dist.get_process_group_ranks(group)
    if this_rank() == min(ranks):
        _warn_of_gradients(_only_different(replicated, gradients), ranks)


def _all_replicated(
    members: list[tuple[Plan, set[int]]], known: dict[int, str], options: MuonConfig
) -> list[Replicated]:
    """Return `_replicated` of all plans."""
    return [c for plan, numbers in members for c in _replicated(plan, numbers, known, options)]


def _replicated(
    plan: Plan, numbers: set[int], known: dict[int, str], options: MuonConfig
) -> list[Replicated]:
    """Return the comparable values of the parameters with indices `numbers` in a plan."""
    is_replica = {}  # id of a layout -> whether all ranks store the whole
    found = []
    for i in sorted(numbers):
        param = plan.params[i]
        layout = plan.layouts[i]
        if id(layout) not in is_replica:
            is_replica[id(layout)] = len(set(layout.boxes.values())) == 1
        given = _given_name(plan, i, known)
        weight = _first_elements(param) if is_replica[id(layout)] else None
        # Without grads_are_reduced each rank has the gradient of its own batch
        reduced = weight is not None and layout.plain and options.grads_are_reduced
        gradient = _first_elements(param.grad, weight) if reduced else None
        is_sent = plan.rank_plans is not None
        signature = _signature(plan, i)
        entry = Replicated(given or plan.names[i], given, signature, is_sent, weight, gradient)
        found.append(entry)
    return found


def _first_elements(tensor: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the first COMPARED_ELEMENTS elements of the rank's first row, in fp32.

    `tensor`: a parameter or gradient. `like`: for a gradient, the first elements of its parameter.
    A missing gradient, or a gradient of a different shape, gives NaN for each element of `like`.
    """
    row = like
    if tensor is not None and tensor.layout is torch.strided:
        local = local_of(tensor)
        row = local[(0,) * (local.ndim - 1)] if local.numel() and local.ndim else local.reshape(-1)
        row = row[:COMPARED_ELEMENTS].float()
    is_valid = like is None or row is not like and row.shape == like.shape
    return row if is_valid else torch.full_like(like, torch.nan)


def _extremes(
    rows: list[torch.Tensor | None], group: dist.ProcessGroup, device: torch.device
) -> list[tuple | None]:
    """Return for each row (maximum, minimum) of every element over the ranks, on the CPU; None for
    None. NaN of a rank does not count. Collective, unless all rows are None.
    """
    present = [row for row in rows if row is not None]
    if not present:
        return [None] * len(rows)
    values = torch.cat(present).to(device)
    # The minimum is the negated maximum of the negated values: one all-reduce for both
    extremes = torch.stack([values, -values])
    extremes = extremes.masked_fill(extremes.isnan(), -torch.inf)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    most, least = extremes.cpu()
    lengths = [len(row) for row in present]
    parts = zip(most.split(lengths), (-least).split(lengths))
    return [None if row is None else next(parts) for row in rows]


def _differs(extremes: tuple | None) -> bool:
    """Return whether maximum and minimum of an element differ by more than TOLERANCE, relatively;
    see `_extremes`.

    Replicas have equal bits after a broadcast or an all-reduce. The tolerance is for gradients
    changed by each rank alone afterwards, such as by clipping, on GPUs of several kinds.
    """
    if extremes is None:
        return False
    most, least = extremes
    return bool((most - least > TOLERANCE * torch.maximum(most.abs(), least.abs())).any())


def _only_different(
    replicated: list[Replicated], extremes: list[tuple | None]
) -> list[Replicated]:
    """Return the parameters whose values differ between ranks."""
    return list(itertools.compress(replicated, map(_differs, extremes)))


def _refuse_order(
    replicated: list[Replicated], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise RuntimeError if ranks hold equal unnamed weights in different orders. Collective."""
    unnamed = [c for c in replicated if c.identity is None and c.weight is not None]
    if not unnamed:
        return
    digests = [digest_int((c.signature, c.key())) for c in unnamed]
    rows = list(map(tuple, gather_integers(digests, group, device)))
    # Equal orders, or different weights: then the order is not at fault
    if len(set(rows)) == 1 or len({tuple(sorted(row)) for row in rows}) > 1:
        return
    ranks = dist.get_process_group_ranks(group)
    odd = _minority(ranks, rows)
    usual = [rank for rank in ranks if rank not in odd]
    index = next(i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1)
    raise RuntimeError(
        f"rank {this_rank()}: the ranks have different plans. Ranks {odd} and ranks {usual} differ "
        "in: the order of parameters, as their first elements show; the first is here "
        f"{unnamed[index].name}. Pass model.named_parameters(), in one order on all ranks"
    )


def _warn_of_weights(differ: list[Replicated], ranks: list[int]) -> None:
    """Warn of replicated weights that differ between ranks."""
    if differ:
        warn_caller(
            f"the weights of {first_few([c.name for c in differ])} differ between ranks "
            f"{first_few(ranks)}, which hold copies of them, and stay different. Begin with "
            "the same weights on all ranks, as DistributedDataParallel does; give parameters that "
            "are to differ by rank a group with a process_group of their own"
        )


def _warn_of_gradients(differ: list[Replicated], ranks: list[int]) -> None:
    """Warn of gradients that differ between ranks although said to be reduced."""
    if differ:
        warn_caller(
            f"the gradients of {first_few([c.name for c in differ])} differ between ranks "
            f"{first_few(ranks)}, although grads_are_reduced=True says that they are means "
            "over these ranks. Weights under AdamW will drift apart. Wrap the model in "
            "DistributedDataParallel, or pass grads_are_reduced=False, with which the "
            "optimizer takes the means"
        )


def _warn_of_order(replicated: list[Replicated], ranks: list[int]) -> None:
    """Warn of unnamed parameters with equal signatures and equal first elements: no rank would
    notice a different order.
    """
    by_form = defaultdict(list)
    names = []
    for c in replicated:
        if c.is_sent:
            by_form[c.signature].append(c)
    for alike in [alike for alike in by_form.values() if len(alike) > 1]:
        keys = [c.key() for c in alike]
        counts = Counter(keys)
        names += [c.name for c, key in zip(alike, keys) if c.identity is None and counts[key] > 1]
    if names:
        warn_caller(
            f"parameters {first_few(names)} have no names, others have the same shape, "
            f"dtype and placement, and ranks {first_few(ranks)} share them. If their order "
            "differed between ranks, pieces of one would be stepped with pieces of "
            "another, and no rank could tell. Pass model.named_parameters()"
        )

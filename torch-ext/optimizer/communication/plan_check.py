"""Comparison of plans before the first step of several ranks, so that a difference is an error and
not a hang.

One row of digests per rank travels, never an object.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..kernels import backend
from ..kernels.backend import triton_version, use_triton
from ..params import errors
from ..params.dtensor import local_of
from ..params.errors import fsdp_names, names_in, warn_caller
from ..params.layout import this_rank
from ..planning.plan import bucket_sort_key, digest

GROUP = (
    "use_muon",
    "lr",
    "weight_decay",
    "betas",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
    "beta2",
)  # betas before momentum, which AdamW groups have from them
OPTIONS = (
    "grads_are_reduced",
    "shard_state",
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
FACTS = (
    "version of the package",
    "version of torch",
    "device, OPTIMIZER_KERNELS or OPTIMIZER_TILES",
    "version of Triton",
    *OPTIONS[:-1],
    UNSCALING,
    "number of parameter groups",
    *(f"group option {key}" for key in GROUP),
    "number of parameters",
    "parameters",
    "buckets (workspace_bytes, or GPUs of other memory)",
)
FEW = 4  # elements of a copy that ranks compare
APART = 1e-3  # relative difference between copies from which on they are told to differ


def check_plans(plans, options, process_groups) -> list[Callable[[], None]]:
    """Compare over every set of ranks that these plans make work together. Raises RuntimeError
    where one differs.

    Returns collective comparisons to call in the next step: of gradients that are all zero in a
    step with lr 0, such as torch.distributed.checkpoint takes to create state.

    Collective: ranks that share parameters call it before anything else travels, the largest sets
    first.
    """
    sets, known, later = [_sets(plan) for plan in plans], _other_names(plans), []
    for ranks in sorted(set().union(*sets), key=bucket_sort_key):
        together = [(plan, found[ranks]) for plan, found in zip(plans, sets) if ranks in found]
        forms = [
            form for plan, numbers in together for form in _forms(plan, sorted(numbers), known)
        ]
        facts = _facts(ranks, [plan for plan, _ in together], forms, options)
        with errors.during(f"the comparison of plans of ranks {ranks}"):
            device = local_of(together[0][0].params[0]).device
            common = process_groups.shared_groups()  # not all may want groups of their own
            shared = _made(common, ranks, common.find_any_order(ranks), device)
            _compare(facts, forms, shared, device)
            later += _compare_copies(together, known, options, shared, device)
            _reuse_idle_group(ranks, process_groups, shared, device)
            _made(process_groups, ranks, shared, device)
    for ranks in sorted(
        {b.ranks for plan in plans for b, _ in plan.shares or () if b.route != "local"},
        key=bucket_sort_key,
    ):
        with errors.during(f"the first exchange of ranks {ranks}"):
            _connect(
                process_groups.get_or_create(ranks),
                process_groups.connected,
                local_of(plans[0].params[0]).device,
            )
    return later


def _reuse_idle_group(ranks, process_groups, shared, device) -> None:
    """Take a process group that an earlier optimizer has left, if it is idle on all ranks: these do
    not let an optimizer go at the same time.
    """
    if idle := process_groups.idle_flags(ranks):
        flags = torch.tensor(idle, dtype=torch.float32, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=shared)
        if 1.0 in (flags := flags.tolist()):
            process_groups.reuse(ranks, flags.index(1.0))


_pause = random.Random()


def _made(process_groups, ranks, over, device):
    """The process group of these ranks; a new one is made while no other thread of theirs makes
    one.

    torch's store serves one thread at a time, also one that waits for another rank. Two threads
    that make groups in different orders on two ranks would wait for ever. So the ranks of a new
    group ask each other, `over` a group that they have, until each has the lock of its process.
    None: they have no group, and do not ask.
    """
    making = process_groups.creation_lock()
    while over is not None and process_groups.would_create(ranks):
        mine = making.acquire(blocking=False)
        try:
            free = torch.tensor(int(mine), dtype=torch.int32, device=device)
            dist.all_reduce(free, dist.ReduceOp.MIN, group=over)
            if free.item():
                process_groups.get_or_create(ranks)
        finally:
            if mine:
                making.release()
        if process_groups.would_create(ranks):
            time.sleep(_pause.uniform(0.001, 0.02))
    return process_groups.get_or_create(ranks)


def _connect(group, connected, device) -> None:
    """Have all pairs of ranks exchange something, once, while nothing else is under way: NCCL
    connects two ranks when they first do, and then waits for both.
    """
    if group not in connected:
        both = (torch.zeros(group.size(), dtype=torch.int32, device=device) for _ in "12")
        dist.all_to_all_single(*both, group=group)
        connected.add(group)


def _sets(plan) -> dict:
    """ranks -> numbers of the parameters for which these ranks exchange something."""
    sets = {}
    for number in plan.shared:
        sets.setdefault(plan.layouts[number].ranks, set()).add(number)
    for bucket, _ in plan.shares or ():
        if bucket.route != "local":
            sets.setdefault(bucket.ranks, set()).update(m.param for m in bucket.matrices)
    return {ranks: numbers for ranks, numbers in sets.items() if len(ranks) > 1}


def _facts(ranks, plans, forms, options) -> list:
    """One number for each of FACTS."""
    device = local_of(plans[0].params[0]).device
    buckets = [
        digest(
            [b for b, _ in plan.shares or () if b.ranks == ranks and b.route != "local"],
            plan.layouts,
        )
        for plan in plans
    ]
    options = [str(getattr(options, key)) for key in OPTIONS]
    # Of which one may have several plans
    groups = list({id(plan.group): plan.group for plan in plans}.values())
    by_group = [[_plain(group.get(key)) for group in groups] for key in GROUP]
    kernels = (
        device.type,
        use_triton(device),
        backend.choices(),
        sorted({plan.cost_model_key for plan in plans} - {""}),
    )
    texts = [
        _sources(),
        torch.__version__,
        kernels,
        triton_version(device),
        *options,
        len(groups),
        *by_group,
    ]
    return [
        *map(_number, texts),
        len(forms),
        _number([number for _, number in forms]),
        _number(buckets),
    ]


def _other_names(plans: list) -> dict[int, str]:
    """{id: name} of parameters whose group gives no names, where FSDP2 has them."""
    unnamed = [id(p) for plan in plans if not plan.group.get("param_names") for p in plan.params]
    known = fsdp_names() if unnamed else {}
    return {key: known[key] for key in unnamed if key in known}


def _forms(plan, numbers, known) -> list:
    """[(what a parameter is called, a number for what it is)]; names count where the user or FSDP2
    gave them.
    """
    names, found = names_in(plan.group), []
    for i in numbers:
        param, layout = plan.params[i], plan.layouts[i]
        given = names[param] if plan.group.get("param_names") else known.get(id(param))
        name = f"{given or names[param]} of shape {layout.shape}"
        found.append((name, _number((given, *_form(plan, i)))))
    return found


def _form(plan, number: int) -> tuple:
    """What a parameter has in common with others for which ranks could take it."""
    return plan.params[number].dtype, plan.layouts[number].digest, plan.mismatched.get(number)


def _plain(value):
    """A group option so that equal ones read alike: lr may be a tensor, betas a list."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def _number(thing) -> int:
    return int.from_bytes(hashlib.sha256(repr(thing).encode()).digest()[:7], "big")


@functools.cache
def _sources() -> str:
    """A digest of this package's own sources: their bits decide the bits of a step."""
    folder = Path(__file__).parent.parent
    texts = [
        (str(path.relative_to(folder)), path.read_bytes())
        for path in folder.rglob("*.py")
        if path.name != "_ops.py"
    ]
    return hashlib.sha256(repr(sorted(texts)).encode()).hexdigest()


def _compare(facts, forms, group, device) -> None:
    ranks, rows = dist.get_process_group_ranks(group), _gather(facts, group, device)
    for place, fact in enumerate(FACTS):
        odd = _odd(ranks, [row[place] for row in rows])
        if odd and fact == "parameters":
            fact = _first(forms, group, device)
        if odd:
            usual = [rank for rank in ranks if rank not in odd]
            raise RuntimeError(
                f"rank {this_rank()}: the ranks have different plans. Ranks {odd} and ranks "
                f"{usual} "
                f"differ in: {fact}. Build the optimizer alike on all ranks"
            )


def _odd(ranks, values) -> list:
    """The ranks that have not what most have; of a tie, not what the first rank has."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    return [rank for rank, value in zip(ranks, values) if value != usual]


def _first(forms, group, device) -> str:
    """Where the lists of parameters part; they are of one length, and all ranks know that they
    differ.
    """
    rows = _gather([number for _, number in forms], group, device)
    place = next(i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1)
    return (
        f"parameters; the first is number {place}, here {forms[place][0]} (order, shape, dtype, "
        "placement, or that "
        "of its gradient)"
    )


def _gather(numbers, group, device) -> list:
    """The numbers of every rank, by rank; as many from each."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    return [row.tolist() for row in theirs]


@dataclass
class Copied:
    """A parameter that several ranks share. `name`: for messages; `identity`: the name by which all
    ranks know it, None without; `form`: see `_form`; `travels`: whether its pieces go to other
    ranks, which find them by their order; `weight`, `gradient`: its first elements, where every
    rank is to have the same ones, else None.
    """

    name: str
    identity: str | None
    form: tuple
    travels: bool
    weight: torch.Tensor | None
    gradient: torch.Tensor | None

    def key(self) -> object:
        """The name, or a number for the first elements; the same for all that have neither."""
        rows = [None if row is None else row.tolist() for row in (self.weight, self.gradient)]
        return self.identity or _number(rows)


def _compare_copies(together, known, options, group, device) -> list[Callable[[], None]]:
    """Compare the first elements of weights and reduced gradients that ranks hold copies of.

    `together`: [(plan, numbers of parameters that the ranks of `group` share)]; `known`: {id: name}
    of parameters to which the user gave no name. Raises RuntimeError where ranks have parameters
    without names in different orders. The lowest rank warns of other differences, and of parameters
    that could be taken for each other without any rank noticing. Collective. Returns the comparison
    of gradients again, where these are all zero and each lr is 0, else [].
    """
    copied = [c for plan, numbers in together for c in _copied(plan, numbers, known, options)]
    ends = _ends([c.weight for c in copied] + [c.gradient for c in copied], group, device)
    weights, gradients = ends[: len(copied)], ends[len(copied) :]
    if any(map(_is_apart, weights)):
        _refuse_order(copied, group, device)
    ranks = dist.get_process_group_ranks(group)
    if this_rank() == min(ranks):
        _warn_of_weights(_apart(copied, weights), ranks)
        _warn_of_gradients(_apart(copied, gradients), ranks)
        _warn_of_order(copied, ranks)
    told = [ends for ends in gradients if ends is not None]
    rests = all(_plain(plan.group["lr"]) == 0 for plan, _ in together)
    if not told or not rests or any((most > 0).any() or (least < 0).any() for most, least in told):
        return []
    return [functools.partial(_compare_gradients, together, known, options, group, device)]


def _compare_gradients(together, known, options, group, device) -> None:
    """The part of `_compare_copies` that is about gradients, for the gradients of now."""
    copied = [c for plan, numbers in together for c in _copied(plan, numbers, known, options)]
    with errors.during("the comparison of gradients of which ranks hold copies"):
        ends = _ends([c.gradient for c in copied], group, device)
    ranks = dist.get_process_group_ranks(group)
    if this_rank() == min(ranks):
        _warn_of_gradients(_apart(copied, ends), ranks)


def _copied(plan, numbers: set[int], known: dict[int, str], options) -> list[Copied]:
    """What of these parameters of one plan can be compared."""
    names, is_copy, found = names_in(plan.group), {}, []
    for i in sorted(numbers):
        param, layout = plan.params[i], plan.layouts[i]
        if id(layout) not in is_copy:
            is_copy[id(layout)] = len(set(layout.boxes.values())) == 1
        given = names[param] if plan.group.get("param_names") else known.get(id(param))
        weight = _first_of(param) if is_copy[id(layout)] else None
        reduced = weight is not None and layout.plain and options.grads_are_reduced
        gradient = _first_of(param.grad, weight) if reduced else None
        name, travels = given or names[param], plan.shares is not None
        found.append(Copied(name, given, _form(plan, i), travels, weight, gradient))
    return found


def _first_of(tensor: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """The first FEW elements of this rank's first row, in fp32. A gradient that is not there, or is
    not of its parameter's shape, has NaN for each element of `like`, the first ones of the
    parameter.
    """
    row = like
    if tensor is not None and tensor.layout is torch.strided:
        local = local_of(tensor)
        row = local[(0,) * (local.ndim - 1)] if local.numel() and local.ndim else local.reshape(-1)
        row = row[:FEW].float()
    is_there = like is None or row is not like and row.shape == like.shape
    return row if is_there else torch.full_like(like, torch.nan)


def _ends(rows: list[torch.Tensor | None], group, device) -> list[tuple | None]:
    """For each row, (its largest numbers, its smallest ones) over the ranks, on the CPU; None for
    None. A rank with NaN does not count there. Collective, unless all rows are None.
    """
    there = [row for row in rows if row is not None]
    if not there:
        return [None] * len(rows)
    values = torch.cat(there).to(device)
    ends = torch.stack([values, -values])
    ends = ends.masked_fill(ends.isnan(), -torch.inf)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    most, least = ends.cpu()
    lengths = [len(row) for row in there]
    parts = zip(most.split(lengths), (-least).split(lengths))
    return [None if row is None else next(parts) for row in rows]


def _is_apart(ends: tuple | None) -> bool:
    """Whether numbers of a row differ between ranks by more than APART, relatively; see `_ends`.

    Copies have the same bits after a broadcast or an all-reduce. The tolerance is for gradients on
    which each rank has worked alone since then, as clipping does, on GPUs of several kinds.
    """
    if ends is None:
        return False
    most, least = ends
    return bool((most - least > APART * torch.maximum(most.abs(), least.abs())).any())


def _apart(copied: list[Copied], ends: list[tuple | None]) -> list[Copied]:
    return list(itertools.compress(copied, map(_is_apart, ends)))


def _refuse_order(copied: list[Copied], group, device) -> None:
    """Raise RuntimeError if ranks have the same weights in different orders, of parameters without
    names. Collective.
    """
    unnamed = [c for c in copied if c.identity is None and c.weight is not None]
    if not unnamed:
        return
    rows = list(map(tuple, _gather([_number((c.form, c.key())) for c in unnamed], group, device)))
    if len(set(rows)) == 1 or len({tuple(sorted(row)) for row in rows}) > 1:
        return
    ranks = dist.get_process_group_ranks(group)
    odd = _odd(ranks, rows)
    usual = [rank for rank in ranks if rank not in odd]
    place = next(i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1)
    raise RuntimeError(
        f"rank {this_rank()}: the ranks have different plans. Ranks {odd} and ranks {usual} differ "
        "in: the order of parameters, as their first elements show; the first is here "
        f"{unnamed[place].name}. Pass model.named_parameters(), in one order on all ranks"
    )


def _warn_of_weights(differ: list[Copied], ranks: list[int]) -> None:
    if differ:
        warn_caller(
            f"the weights of {_some([c.name for c in differ])} differ between ranks "
            f"{_some(ranks)}, which hold copies of them, and stay different. Begin with "
            "the same weights on all ranks, as DistributedDataParallel does"
        )


def _warn_of_gradients(differ: list[Copied], ranks: list[int]) -> None:
    if differ:
        warn_caller(
            f"the gradients of {_some([c.name for c in differ])} differ between ranks "
            f"{_some(ranks)}, although grads_are_reduced=True says that they are means "
            "over these ranks. Weights under AdamW will drift apart. Wrap the model in "
            "DistributedDataParallel, or pass grads_are_reduced=False, with which the "
            "optimizer takes the means"
        )


def _warn_of_order(copied: list[Copied], ranks: list[int]) -> None:
    """Warn of parameters of one form without names that no rank could tell apart in another
    order.
    """
    forms, names = defaultdict(list), []
    for c in copied:
        if c.travels:
            forms[c.form].append(c)
    for alike in [alike for alike in forms.values() if len(alike) > 1]:
        keys = [c.key() for c in alike]
        counts = Counter(keys)
        names += [c.name for c, key in zip(alike, keys) if c.identity is None and counts[key] > 1]
    if names:
        warn_caller(
            f"parameters {_some(names)} have no names, others have the same shape, "
            f"dtype and placement, and ranks {_some(ranks)} share them. If their order "
            "differed between ranks, pieces of one would be stepped with pieces of "
            "another, and no rank could tell. Pass model.named_parameters()"
        )


def _some(things: list) -> str:
    """The first things of a list, in words."""
    more = f" and {len(things) - 3} more" if len(things) > 3 else ""
    return ", ".join(map(str, things[:3])) + more

"""What ranks compare before their first step together, so that those which differ say so and do not wait for each
other.

Decides: what has to be alike, and in which words a difference is told. Digests travel, one row of numbers per rank;
must not know: how a plan is made or run.
"""
from __future__ import annotations

import functools
import hashlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from . import debug
from .kernels import triton_version, use_triton
from .layout import local_of, this_rank
from .names import names_in
from .plan import digest, turn

GROUP = ("use_muon", "lr", "weight_decay", "betas", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
         "adjust_lr_fn", "beta2")  # betas before momentum, which AdamW groups have from them
OPTIONS = ("grads_are_reduced", "shard_state", "state_dtype", "wire_dtype", "ns_dtype", "nonfinite", "capturable",
           "overlap_backward", "overlap_forward", "unscale_in_step")
FACTS = ("version of the package", "version of torch", "device, OPTIMIZER_KERNELS or OPTIMIZER_TILES",
         "version of Triton", *OPTIONS, "number of parameter groups", *(f"group option {key}" for key in GROUP),
         "number of parameters", "parameters",
         "buckets (workspace_bytes, or GPUs of other memory)")


def agree(plans, options, process_groups) -> None:
    """Compare over every set of ranks that these plans make work together. Raises RuntimeError where one differs.

    Collective: ranks that share parameters call it before anything else travels, the largest sets first.
    """
    sets = {ranks for plan in plans for ranks in _sets(plan)}
    for ranks in sorted(sets, key=turn):
        together = [(plan, numbers) for plan in plans if (numbers := _sets(plan).get(ranks))]
        forms = [form for plan, numbers in together for form in _forms(plan, sorted(numbers))]
        facts = _facts(ranks, [plan for plan, _ in together], forms, options)
        with debug.during(f"the comparison of plans of ranks {ranks}"):
            device = local_of(together[0][0].params[0]).device
            shared = process_groups.shared().of(ranks)  # not all may want groups of their own
            _compare(facts, forms, shared, device)
            _take_idle(ranks, process_groups, shared, device)
            process_groups.of(ranks)
    for ranks in sorted({b.ranks for plan in plans for b, _ in plan.shares or () if b.route != "local"}, key=turn):
        with debug.during(f"the first exchange of ranks {ranks}"):
            _connect(process_groups.of(ranks), process_groups.connected, local_of(plans[0].params[0]).device)


def _take_idle(ranks, process_groups, shared, device) -> None:
    """Take a process group that an earlier optimizer has left, if it is idle on all ranks: these do not let an
    optimizer go at the same time.
    """
    if idle := process_groups.idle(ranks):
        flags = torch.tensor(idle, dtype=torch.float32, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=shared)
        if 1.0 in (flags := flags.tolist()):
            process_groups.take(ranks, flags.index(1.0))


def _connect(group, connected, device) -> None:
    """Have all pairs of ranks exchange something, once, while nothing else is under way: NCCL connects two ranks when
    they first do, and then waits for both.
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
    buckets = [digest([b for b, _ in plan.shares or () if b.ranks == ranks and b.route != "local"], plan.layouts)
               for plan in plans]
    options = [str(getattr(options, key)) for key in OPTIONS]
    groups = list({id(plan.group): plan.group for plan in plans}.values())  # of which one may have several plans
    by_group = [[_plain(group.get(key)) for group in groups] for key in GROUP]
    kernels = device.type, use_triton(device), debug.choices(), sorted({plan.pace for plan in plans} - {""})
    texts = [_sources(), torch.__version__, kernels, triton_version(device), *options, len(groups), *by_group]
    return [*map(_number, texts), len(forms), _number([number for _, number in forms]), _number(buckets)]


def _forms(plan, numbers) -> list:
    """[(what a parameter is called, a number for what it is)]; names count where the user gave them."""
    names, found = names_in(plan.group), []
    for i in numbers:
        param, layout = plan.params[i], plan.layouts[i]
        given = names[param] if plan.group.get("param_names") else None
        found.append((f"{names[param]} of shape {layout.shape}",
                      _number((given, param.dtype, layout.digest, plan.strays.get(i)))))
    return found


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
    folder = Path(__file__).parent
    texts = [(str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("*.py")
             if path.name != "_ops.py"]
    return hashlib.sha256(repr(sorted(texts)).encode()).hexdigest()


def _compare(facts, forms, group, device) -> None:
    ranks, rows = dist.get_process_group_ranks(group), _gather(facts, group, device)
    for place, fact in enumerate(FACTS):
        odd = _odd(ranks, [row[place] for row in rows])
        if odd and fact == "parameters":
            fact = _first(forms, group, device)
        if odd:
            usual = [rank for rank in ranks if rank not in odd]
            raise RuntimeError(f"rank {this_rank()}: the ranks have different plans. Ranks {odd} and ranks {usual} "
                               f"differ in: {fact}. Build the optimizer alike on all ranks")


def _odd(ranks, values) -> list:
    """The ranks that have not what most have; of a tie, not what the first rank has."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    return [rank for rank, value in zip(ranks, values) if value != usual]


def _first(forms, group, device) -> str:
    """Where the lists of parameters part; they are of one length, and all ranks know that they differ."""
    rows = _gather([number for _, number in forms], group, device)
    place = next(i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1)
    return (f"parameters; the first is number {place}, here {forms[place][0]} (order, shape, dtype, placement, or that "
            "of its gradient)")


def _gather(numbers, group, device) -> list:
    """The numbers of every rank, by rank; as many from each."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    return [row.tolist() for row in theirs]

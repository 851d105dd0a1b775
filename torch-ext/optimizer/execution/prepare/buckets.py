"""The buckets of all plans in the order of a step, and their places in the workspace. Takes no
memory: memory/predicted.py counts the bytes of a step that is not bound.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from ...params.config import MuonConfig
from ...pipeline import BUCKETS_IN_FLIGHT
from ...planning.plan import Bucket, bucket_sort_key, check_bucket_buffers
from ...planning.planner import Plan
from ...planning.rank_plan import RankPlan
from ...rules.rule import selection_of
from ..elementwise_updates import BUCKET_UPDATES
from ..param_store import Store
from ..workspace import Workspace

BucketTask = tuple[Store, dict, Bucket, RankPlan]  # the dict: the live parameter group


def reserve(
    tasks: Sequence[BucketTask], options: MuonConfig, device: torch.device | None = None
) -> tuple[Workspace, list[int], list[str | None]]:
    """Return (workspace with the bytes of all buckets counted, number of each bucket in it, name of
    the memory of its stacks). Allocates nothing. `device`: None if no memory will be taken.
    """
    buffer_count, local_number = _buffer_counts([bucket for _, _, bucket, _ in tasks], options)
    # Buckets with all-to-alls use bucket buffers in turn; all local buckets use one buffer
    in_turn = [BUCKET_UPDATES[bucket.route].has_collectives for _, _, bucket, _ in tasks]
    counts = itertools.accumulate(in_turn, initial=0)
    numbers = [count if turns else local_number for count, turns in zip(counts, in_turn)]
    limit = options.workspace_bytes
    for names in (_stacks_apart(tasks, options), [None] * len(tasks)):
        workspace = Workspace(buffer_count, device)
        for (_, _, _, rank_plan), number, name in zip(tasks, numbers, names):
            workspace.reserve(number, rank_plan, name)
        if limit is None or sum(workspace.sizes.values()) <= limit:
            break
    return workspace, numbers, names


def _stacks_apart(tasks: Sequence[BucketTask], options: MuonConfig) -> list[str | None]:
    """Name of the memory of each bucket's stacks; None: the shared scratch. With offload_state
    local buckets use two memories in turn: U of the next one is written during Newton-Schulz.
    """
    found: list[str | None] = [None] * len(tasks)
    # Not with a selection, which writes whole pieces to the shared scratch
    ahead = [
        number
        for number, (_, group, bucket, _) in enumerate(tasks)
        if bucket.route == "local" and selection_of(group) is None
    ]
    if options.offload_state and not options.overlap_backward and len(ahead) > 1:
        for turn, number in enumerate(ahead):
            found[number] = f"stacks {turn % 2}"
    return found


def sorted_buckets(
    plans: Sequence[Plan], stores: Sequence[Store | None], options: MuonConfig
) -> list[BucketTask]:
    """Buckets of all plans in the order of a step.

    By default buckets of equal ranks are adjacent. With overlap_forward, the first buckets of all
    families (route, ranks) come first among buckets of equal ranks, then the second buckets. With
    overlap_backward the first buckets of all families come first, and buckets without an inbound
    all-to-all last. Sort keys contain only facts known to all ranks of a bucket, so all ranks find
    a common order.
    """
    tasks = []
    for plan, store in zip(plans, stores):
        counts = Counter((b.route, b.ranks) for b, _ in plan.rank_plans or ())
        seen = Counter()
        for bucket, rank_plan in plan.rank_plans or ():
            family = bucket.route, bucket.ranks
            seen[family] += 1
            position = seen[family] / counts[family]  # in the family, up to 1
            by_ranks = bucket_sort_key(bucket.ranks)
            key = by_ranks, position * options.overlap_forward
            if options.overlap_backward:
                key = not rank_plan.crosses_inbound, position, by_ranks
            tasks.append((key, (store, plan.group, bucket, rank_plan)))
    return [task for _, task in sorted(tasks, key=lambda task: task[0])]


def _buffer_counts(buckets: Sequence[Bucket], options: MuonConfig) -> tuple[int, int]:
    """(number of bucket buffers, buffer of local buckets). Raises as `check_bucket_buffers`."""
    if not options.overlap_backward:
        # Buffer 1: buckets without all-to-alls run when only bucket 0 has started
        return BUCKETS_IN_FLIGHT, 1
    # During backward any number of buckets may be in flight, each with a buffer of its own. The
    # planner has checked shared buckets; this check includes buckets that this rank steps alone.
    check_bucket_buffers(buckets, options.workspace_bytes)
    count = sum(BUCKET_UPDATES[bucket.route].has_collectives for bucket in buckets)
    return count + 1, count

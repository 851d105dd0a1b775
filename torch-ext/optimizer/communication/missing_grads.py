"""Missing gradients: after a step the ranks agree which parameters had a gradient on any rank, and
restore all parameters without.

[Note: missing gradients] A missing gradient counts as zero, because all ranks must issue equal
collectives. A parameter without gradient on any rank must nevertheless stay unchanged, as in torch:
weight and state are copied before the step and copied back after the step. The ranks compare flags
in a small all-reduce. On GPUs only a rank with a missing gradient waits for the result. On CPUs
every rank waits: gloo needs the process of every rank until all ranks have the result. Parameters
stepped by a rank alone need no comparison and are always restored.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..kernels.backend import capturing
from ..params import errors
from ..pipeline import StepHook
from ..planning.plan import bucket_sort_key
from ..planning.planner import Plan, StoreOfPlan
from ..rules.rule import changes_at_lr_0, rule_of
from .process_groups import ProcessGroups


def flag_counts(plans: Sequence[Plan]) -> dict[tuple, int]:
    """Return {ranks: number of gradients that these ranks compare after a step}, in an order equal
    on all ranks.
    """
    counts = Counter()
    for plan in plans:
        counts.update(filter(None, map(plan.compared_by, range(len(plan.params)))))
    return {ranks: counts[ranks] for ranks in sorted(counts, key=bucket_sort_key)}


class MissingGradients(StepHook):
    """Restores parameters without gradient on any rank, see [Note: missing gradients].

    `error`: an exception of the comparison on a rank without use for the result. The step of the
    rank is complete; the next step raises the exception.
    """

    def __init__(
        self,
        plans: Sequence[Plan] = (),
        stores: Sequence[StoreOfPlan] = (),
        process_groups: ProcessGroups | None = None,
        flags: dict[tuple, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        """`flags`: ranks -> (flags of this rank, maximum over the ranks), fp32 on the device. Every
        step uploads the flags of this rank with the other inputs.
        """
        # Ranks that compare flags, () for parameters of a rank alone -> [(store, parameter index)]
        self.members = {}
        self.stores = stores
        self.process_groups = process_groups
        self.groups = {}  # ranks -> process group, found by the first comparison
        self.saved = {}  # (ranks, index in members) -> copies made before the step
        self.works = []  # handles of all-reduces in flight
        self.has_missing = False  # whether a gradient of this step is missing at this rank
        self.flags = flags or {}
        self.error: Exception | None = None
        # Whether this step restores `Store.counts_of` and nothing else
        self.only_counts = False
        # Whether every gradient of this rank was zero in a step that may create state only
        self.all_zero = False
        self.device = stores[0].device if stores else torch.device("cpu")
        for plan, store in zip(plans, stores):
            for number in range(len(plan.params)):
                self.members.setdefault(plan.compared_by(number), []).append((store, number))
        # The order of `flags`, and so of the all-reduces
        sets = sorted(self.members, key=bucket_sort_key)
        self.members = {ranks: self.members[ranks] for ranks in sets}
        # Result of `local_flags` in the usual step, without a loop over parameters
        self.all_present = [True] * sum(
            len(members) for ranks, members in self.members.items() if ranks
        )

    def local_flags(self) -> list[bool]:
        """Return a flag for each compared parameter, in the order of `flags`: whether the rank has
        the gradient. Sets `has_missing` for the rest of the step.
        """
        self.has_missing = False
        for store in self.stores:
            self.has_missing = self.has_missing or bool(store.missing)
        if not self.has_missing:
            return self.all_present
        return [
            number not in store.missing
            for ranks, members in self.members.items()
            if ranks  # a parameter that the rank steps alone is not compared
            for store, number in members
        ]

    def begin_step(self, creates_state: bool) -> None:
        """Begin a step whose gradients the stores have read.

        `creates_state`: whether the step may be a first step with lr 0, which creates state and
        changes nothing else if all gradients are zero (`report_zeros_as_missing`). Sets
        `only_counts` anew, since a failed step may have left an old value.
        """
        self.all_zero = creates_state and self.report_zeros_as_missing()
        self.only_counts = self.all_zero
        # Some forms of decay and some rules change weights or state in a step with lr 0, too
        if self.only_counts:
            groups = [group for store in self.stores for group in store.groups]
            self.only_counts = not any(
                group.get("decay") == "independent"
                or group["use_muon"]
                and changes_at_lr_0(rule_of(group))
                for group in groups
            )

    def report_zeros_as_missing(self) -> bool:
        """Report every gradient of the rank as missing if all gradients are zero; return whether
        all are zero.

        For a first step with lr 0, by which torch.distributed.checkpoint creates state. Weights and
        averages do not change in a step without gradients and lr; only AdamW's step counts, and new
        8-bit momentum, have to be restored. Waits for the device.
        """
        gradients = [g for store in self.stores for g in store.gradients if g.numel()]
        if gradients and bool(torch.stack([g.any() for g in gradients]).any()):
            return False
        for store in self.stores:
            store.report_all_missing()
            self.has_missing = self.has_missing or bool(store.missing)
        return True

    def _restorable(self, store: StoreOfPlan, number: int) -> list[torch.Tensor]:
        """Return the tensors of parameter `number` for `restore`: all, or `counts_of`."""
        return store.counts_of(number) if self.only_counts else store.all_of(number)

    def before_buckets(self, found_inf: torch.Tensor | float | None = None) -> None:
        """Copy the tensors of the rank's parameters without gradient."""
        # A graph cannot wait for work outside of the graph. A user who captures has synchronized
        # before, as torch.cuda.graph does.
        if capturing(self.device):
            self.works = []
        # The last comparison must end first: this step overwrites the flags and `saved`
        if self.works or self.error is not None:
            self.wait()
        self.saved = {}
        if not self.has_missing:
            return
        for ranks, members in self.members.items():
            for i, (store, number) in enumerate(members):
                if number in store.missing:
                    # Copies on the device, only in steps that lack a gradient
                    held = self._restorable(store, number)
                    self.saved[ranks, i] = [t.clone() for t in held]

    @contextlib.contextmanager
    def comparing(self) -> Iterator[Callable[[], None] | None]:
        """Context manager around the launches of a step; compares the flags of the ranks at the
        end.

        Yields None, or during capture of a CUDA graph the function `compare`. A graph has to
        contain the wait for each of the graph's collectives. The pipeline therefore calls `compare`
        after the last collective of the buckets, and the comparison overlaps with the last bucket.
        """
        in_graph = capturing(self.device)
        yield self.compare if in_graph else None
        if in_graph:
            self.wait()  # work outside of a graph cannot wait for work in the graph
        else:
            self.compare()
            self._finish()

    def compare(self) -> None:
        """Start the all-reduce of the flags, for each set of ranks."""
        if not self.flags:
            return
        self.works = []
        try:
            for ranks, (local, maximum) in self.flags.items():
                if ranks not in self.groups:
                    self.groups[ranks] = self.process_groups.get_or_create(ranks)
                # `local` stays: the next step uploads it only if a value changed
                maximum.copy_(local)
                group = self.groups[ranks]
                work = dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group, async_op=True)
                self.works.append(work)
        except Exception as error:
            errors.add_context(error, "the comparison of missing gradients")
            raise
        # Collectives of gloo run in threads of their own
        if self.device.type == "cpu":
            _keep(self.works)

    def _finish(self) -> None:
        """Wait for the comparison on CPUs. Keeps an exception in `error` for `wait`, called
        wherever the result is needed.
        """
        if self.device.type != "cpu":
            return
        works = self.works
        self.works = []
        for work in works:
            try:
                work.wait()
            except Exception as error:
                self.error = self.error or error

    def after_buckets(self) -> None:
        """Restore the parameters without gradient on any rank."""
        if self.saved:
            self.wait()
            self.restore(lambda ranks, i: self.flags[ranks][1][i] > 0 if ranks else None)

    def has_stepped(self) -> bool:
        """Return False after a step that only created state: with lr 0, and zero gradients at this
        rank and, for the parameters shared with it, at all other ranks.

        Two ranks get equal results if both compare equal parameters with equal ranks. Else results
        may differ: if A shares parameters only with B, and B further parameters with C, a nonzero
        gradient of the further parameters makes B return True, and A False. If all gradients are
        zero, as in torch.distributed.checkpoint, every rank returns False.

        Waits for the comparison of flags if the gradients of this rank were zero.
        """
        if not self.all_zero:
            return True
        self.wait()
        return any(bool((maximum > 0).any()) for _, maximum in self.flags.values())

    def stepped(self) -> dict[tuple[int, int], bool]:
        """Return {(id of the store, parameter index): whether the last step had a gradient on any
        rank}. Waits for the device.
        """
        self.wait()
        found = {}
        for ranks, members in self.members.items():
            flags = self.flags[ranks][1].tolist() if ranks else None
            for i, (store, number) in enumerate(members):
                has = flags[i] > 0 if ranks else number not in store.missing
                found[id(store), number] = has
        return found

    def on_error(self) -> None:
        """Restore every copied tensor."""
        with contextlib.suppress(Exception):  # the exception of the step matters more
            self.restore()

    def restore(
        self, was_stepped: Callable[[tuple, int], torch.Tensor | None] = lambda ranks, i: None
    ) -> None:
        """Copy the saved tensors back.

        `was_stepped(ranks, i)`: scalar bool tensor, True if entry i of the parameters compared by
        `ranks` keeps the stepped values. None: restore. The choice is made on the device, without a
        host sync.
        """
        for (ranks, i), before in self.saved.items():
            store, number = self.members[ranks][i]
            stepped = was_stepped(ranks, i)
            for current, saved in zip(self._restorable(store, number), before):
                if stepped is not None:
                    # AdamW's step count may be on the CPU, the flag on the GPU
                    saved = torch.where(stepped.to(current.device), current, saved)
                current.copy_(saved)

    def wait(self) -> None:
        """Wait for the comparison of the last step; afterwards the flags may be written again.
        Raises the exception of the comparison, kept in `error` or raised by a wait.
        """
        # Cleared first: if a wait raises, the next step does not raise again
        works = self.works
        self.works = []
        error = self.error
        self.error = None
        with errors.during("the comparison of missing gradients"):
            if error is not None:
                raise error
            for work in works:
                work.wait()


# Handles that `_keep` holds
_in_flight = []


def _keep(works: list[dist.Work]) -> None:
    """Keep handles of collectives alive until the collectives have completed or the interpreter has
    ended.

    If an optimizer dies earlier, a thread of gloo may hold the last reference to tensors, and needs
    the GIL to release the tensors. At interpreter exit before Python 3.14 the process aborts.
    """
    if _in_flight:
        _in_flight[:] = [work for work in _in_flight if not work.is_completed()]
    _in_flight.extend(works)

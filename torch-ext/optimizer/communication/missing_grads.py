"""Missing gradients: ranks agree after the step which parameters had one anywhere, and restore the
others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..kernels.backend import capturing
from ..params import errors
from ..planning.planner import Plan
from .process_groups import ProcessGroups


def flag_counts(plans: Sequence[Plan]) -> dict[tuple, int]:
    """{ranks: number of gradients that they compare after a step}."""
    counts = Counter()
    for plan in plans:
        counts.update(filter(None, map(plan.compared_by, range(len(plan.params)))))
    return counts


class MissingGradients:
    """Puts back what the step changed of parameters that have no gradient.

    Where ranks must act alike, a missing gradient counts as zero unless no rank has one. After the
    step the ranks compare what they had, in one small collective. On GPUs only a rank that missed a
    gradient waits for it. On CPUs every rank does: a process that ended with its part still to be
    sent would let down a rank that needs the answer. Of parameters whose matrices never travel,
    each rank leaves its own alone, and asks nobody.

    `error`: what the comparison raised at a rank that needs no answer. Its step is whole; the next
    one raises it.
    """

    def __init__(
        self,
        plans: Sequence[Plan] = (),
        stores: Sequence[object] = (),
        process_groups: ProcessGroups | None = None,
        flags: dict[tuple, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        """`flags`: ranks -> (what this rank has, what any rank has), fp32 on the device; a step
        uploads the first.
        """
        self.members = {}  # ranks that compare (None: nobody) -> [(store, parameter index)]
        self.stores = stores
        self.process_groups = process_groups
        self.groups = {}  # ranks -> their process group, once they have compared
        self.saved = {}  # (ranks, index in members) -> copies from before the step
        self.works = []  # collectives in flight
        self.misses = False  # whether a gradient of this step is missing on this rank
        self.flags = flags or {}
        self.error: Exception | None = None
        # Whether a step puts back AdamW's counts of steps and nothing else
        self.only_counts = False
        self.device = stores[0].device if stores else torch.device("cpu")
        for plan, store in zip(plans, stores):
            for number in range(len(plan.params)):
                self.members.setdefault(plan.compared_by(number), []).append((store, number))
        self.all_here = [True] * sum(
            len(members) for ranks, members in self.members.items() if ranks
        )

    def here(self) -> list[bool]:
        """Which gradients of the compared parameters are here, in the order of the flags."""
        self.misses = False
        for store in self.stores:
            self.misses = self.misses or bool(store.missing)
        if not self.misses:
            return self.all_here
        return [
            number not in store.missing
            for ranks, members in self.members.items()
            if ranks
            for store, number in members
        ]

    def begin_step(self, creates_state: bool) -> bool:
        """Return whether a step that may only create state does: `call_zeros_missing`. Anything
        that a failed step has left is forgotten.
        """
        self.only_counts = creates_state and self.call_zeros_missing()
        return self.only_counts

    def call_zeros_missing(self) -> bool:
        """Report all gradients of this rank as missing if each of them is zero; returns whether
        that is so.

        For a first step with lr 0, such as torch.distributed.checkpoint takes to create state.
        Neither weights nor averages change in such a step, so that only AdamW's counts of steps
        have to be put back. Waits for the device.
        """
        gradients = [g for store in self.stores for g in store.gradients if g.numel()]
        if gradients and bool(torch.stack([g.any() for g in gradients]).any()):
            return False
        for store in self.stores:
            store.report_all_missing()
            self.misses = self.misses or bool(store.missing)
        return True

    def _held(self, store, number) -> list:
        """The tensors of one parameter that are put back."""
        return store.counts_of(number) if self.only_counts else store.all_of(number)

    @contextlib.contextmanager
    def around(self):
        """Context manager for a step's work, in which ranks are `compared`."""
        self.save()
        try:
            yield
            self.restore_unstepped()
        except BaseException:
            with contextlib.suppress(Exception):  # the error is what counts
                self.restore()
            raise

    def save(self) -> None:
        """Before the step: copy what may have to be put back."""
        # A graph cannot wait for what is outside of it; who captures has synchronized
        if capturing(self.device):
            self.works = []
        if self.works or self.error is not None:
            self.wait()
        self.saved = {}
        if not self.misses:
            return
        for ranks, members in self.members.items():
            for i, (store, number) in enumerate(members):
                if number in store.missing:
                    held = self._held(store, number)
                    self.saved[ranks, i] = [t.clone() for t in held]

    @contextlib.contextmanager
    def compared(self):
        """Context manager for a step's work, after which ranks ask each other. A graph has to wait
        for the answers: in one they ask as soon as nothing else is to be sent, by what this gives,
        and the last bucket lands meanwhile.
        """
        in_graph = capturing(self.device)
        yield self.compare if in_graph else None
        if in_graph:
            self.wait()  # nothing outside a graph may wait for what is in it
        else:
            self.compare()
            self._finish()

    def compare(self) -> None:
        """Ask the other ranks."""
        if not self.flags:
            return
        self.works = []
        try:
            for ranks, (mine, anybody) in self.flags.items():
                if ranks not in self.groups:
                    self.groups[ranks] = self.process_groups.get_or_create(ranks)
                anybody.copy_(mine)
                group = self.groups[ranks]
                work = dist.all_reduce(anybody, dist.ReduceOp.MAX, group=group, async_op=True)
                self.works.append(work)
        except Exception as error:
            errors.add_context(error, "the comparison of missing gradients")
            raise
        if self.device.type == "cpu":
            _keep(self.works)

    def _finish(self) -> None:
        """On CPUs, wait for the comparison; an error is raised by `wait`, which is called where the
        answer is used.
        """
        if self.device.type != "cpu":
            return
        works, self.works = self.works, []
        for work in works:
            try:
                work.wait()
            except Exception as error:
                self.error = self.error or error

    def restore_unstepped(self) -> None:
        """After the step: put back what no rank has a gradient of."""
        if self.saved:
            self.wait()
            self.restore(lambda ranks, i: self.flags[ranks][1][i] > 0 if ranks else None)

    def restore(self, moves=lambda ranks, i: None) -> None:
        """As it was before the step. `moves`: whether number i of those that `ranks` compare is one
        to be stepped.
        """
        for (ranks, i), before in self.saved.items():
            store, number = self.members[ranks][i]
            moved = moves(ranks, i)
            for now, then in zip(self._held(store, number), before):
                now.copy_(then if moved is None else torch.where(moved.to(now.device), now, then))

    def wait(self) -> None:
        """Until the last step's collective is done: then its memory may be used again."""
        works, self.works = self.works, []
        error, self.error = self.error, None
        with errors.during("the comparison of missing gradients"):
            if error is not None:
                raise error
            for work in works:
                work.wait()


_under_way = []


def _keep(works) -> None:
    """Hold collectives that may outlive their optimizer until they are done, or Python has ended.

    A thread of gloo that is the last to hold one has to ask Python to let its tensors go; if Python
    ends meanwhile (before 3.14), that aborts the process.
    """
    if _under_way:
        _under_way[:] = [work for work in _under_way if not work.is_completed()]
    _under_way.extend(works)

"""The process group of each set of ranks: found among existing groups or created.

`ProcessGroups`: groups of an optimizer. Creates groups, but issues no collective of a step. The
ranks of a new group create it together (`create_together`), in the order of plan_check.py.
`gather_integers`: numbers of all ranks, outside of a step.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.distributed as dist

from ..params.dtensor import is_dtensor, local_of
from ..params.own_process_groups import Choice

Ranks = tuple[int, ...]  # global ranks, in the order of the group
_name = attrgetter("group_name")


class ProcessGroups:
    """The process group of each set of ranks: an existing group (default, of a mesh, of the user)
    if possible, else a created group.

    `dedicated`: use created groups only. During backward the model's collectives are in flight too,
    and ranks may start buckets at different positions among the model's collectives. During forward
    the model's collectives would queue behind the step's in a common group.

    `slow_timeout`: sets of ranks connected only by groups of meshes with a longer timeout than the
    default group. torch gives 30 minutes to gloo groups of a mesh, whatever `init_process_group`
    was given. For the sets `get_or_create` returns a created group with the default group's
    timeout. Empty on GPUs: a created group takes memory, and no host waits for collectives.

    [Note: lifetime of created groups] torch keeps a group until the default group is destroyed, and
    NCCL groups cannot be destroyed at any time. Created groups are therefore shared by all
    optimizers of the process. A dedicated group is reused after the previous optimizer has released
    the group, if all ranks agree. `is_step_complete`: a step has ended since the last collective;
    otherwise a collective unknown to other ranks may be in flight, and the group is never reused.

    [Note: threads and process groups] Optimizers may step in several threads, if each has a process
    group or meshes of its own. The order of threads differs between ranks. A created group is
    therefore named after its template, the existing group of the ranks, and is shared only among
    optimizers with an equal template.
    """

    def __init__(self, dedicated: bool = False) -> None:
        """Start without groups; `find_existing` and `get_or_create` fill the tables."""
        self.dedicated = dedicated
        self.created: dict[Ranks, CreatedGroup] = {}  # groups that this package created
        self.existing: dict[Ranks, dist.ProcessGroup] = {}  # of meshes, the user, or the default
        # Set of ranks -> group whose backends and timeout a new group of these ranks gets
        self.templates: dict[frozenset[int], dist.ProcessGroup] = {}
        self.slow_timeout: set[frozenset[int]] = set()  # sets of ranks
        self.used: set[Ranks] = set()  # ranks whose group the current plans use
        self.connected: set[dist.ProcessGroup] = set()  # groups whose ranks are connected in pairs
        self.backends: set[str] = set()  # backend configurations, see `find_backends`
        self.is_step_complete = False

    def begin_step(self) -> None:
        """Note the start of a step: from now on collectives may be in flight."""
        self.is_step_complete = False

    def end_step(self) -> None:
        """Note the end of a step: all collectives were issued, and none failed."""
        self.is_step_complete = True

    def find_existing(
        self,
        params: list[torch.Tensor],
        process_group: dist.ProcessGroup | None,
        own: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """Find the existing groups for the parameters of a step, and forget which groups earlier
        plans used. `own`: process groups of parameter groups.

        If several groups connect equal ranks (two meshes with an axis over the ranks), all ranks
        choose alike: the optimizer's `process_group`, else the first of `own` by name, else the
        default group, else the first by name.
        """
        self.used.clear()
        self.existing = {}
        # Sorted by name: names are equal on all ranks, while the order of a set is not
        for group in sorted(_meshes_groups(params), key=_name):
            self.existing.setdefault(_ranks_of(group), group)
        templates = dict(self.existing)
        device = local_of(params[0]).device.type if params else ""
        slow = [ranks for ranks, group in templates.items() if _is_slow(group, device)]
        for ranks in slow:
            del self.existing[ranks]
        self.existing |= {_ranks_of(group): group for group in _default_and_given(process_group)}
        # A group given by the user replaces every group of the same ranks in another order: plans
        # follow the order of the user's group
        given = {_ranks_of(group): group for group in reversed(sorted(own, key=_name))}
        given |= {} if process_group is None else {_ranks_of(process_group): process_group}
        members = set(map(frozenset, given))
        self.existing = {
            ranks: group
            for ranks, group in self.existing.items()
            if frozenset(ranks) not in members
        }
        self.existing |= given
        # Slow groups stay templates of new groups: groups of different meshes over equal ranks
        # differ in name and backends
        templates |= self.existing
        self.templates = {frozenset(ranks): group for ranks, group in templates.items()}
        self.slow_timeout = set(map(frozenset, slow)) - set(map(frozenset, self.existing))

    def find_backends(
        self, params: list[torch.Tensor], process_group: dist.ProcessGroup | None
    ) -> None:
        """Collect the backends of the existing groups of `params`, for `can_send_once`."""
        groups = [*_default_and_given(process_group), *_meshes_groups(params)]
        self.backends = {dist.get_backend_config(group) for group in groups}

    def get_or_create(self, ranks: Ranks) -> dist.ProcessGroup:
        """Return the process group of `ranks`. All ranks of the group call the method in an order
        given by the plan, since a new group waits for all of its ranks.
        """
        self.used.add(ranks)
        if not self.dedicated and ranks in self.existing:
            return self.existing[ranks]
        if ranks not in self.created:
            earlier = self._created_before(ranks)
            # An idle dedicated group is chosen by `reuse`, after all its ranks have agreed
            if self.dedicated or not earlier:
                entry = CreatedGroup(_new(ranks, self._template(ranks), self._timeout(ranks)))
                earlier.append(entry)
            else:
                entry = earlier[-1]
            self._use(ranks, entry)
        return self.created[ranks].group

    def create_together(
        self, ranks: Ranks, over: dist.ProcessGroup | None, device: torch.device
    ) -> dist.ProcessGroup:
        """Return the process group of `ranks`. A new group is created while no other thread of
        these processes creates a group. Collective over `over` if it is new.

        torch's store serves a single thread at a time, even while the thread waits for another
        rank. Two threads that create groups in different orders on two ranks would wait forever.
        The ranks of a new group therefore compare, in `over`, an existing group, until each rank
        holds the lock of its process. `over` None: no existing group, no comparison.
        """
        lock = self.creation_lock()
        while over is not None and self.would_create(ranks):
            # Never blocking: another rank may hold the lock of its process for another group
            has_lock = lock.acquire(blocking=False)
            try:
                all_have = torch.tensor(int(has_lock), dtype=torch.int32, device=device)
                dist.all_reduce(all_have, dist.ReduceOp.MIN, group=over)
                if all_have.item():
                    self.get_or_create(ranks)
            finally:
                if has_lock:
                    lock.release()
            # A random pause, or two groups of threads could keep taking each other's locks
            if self.would_create(ranks):
                time.sleep(_pause.uniform(0.001, 0.02))
        return self.get_or_create(ranks)

    def connect_pairs(self, ranks: Ranks, device: torch.device) -> None:
        """Send a number between all pairs of `ranks`, once for each group, while no other
        collective is in flight. NCCL connects two ranks at the first message and blocks both
        meanwhile. Collective.
        """
        group = self.get_or_create(ranks)
        if group not in self.connected:
            received = torch.zeros(group.size(), dtype=torch.int32, device=device)
            dist.all_to_all_single(received, torch.zeros_like(received), group=group)
            self.connected.add(group)

    def creation_lock(self) -> threading.Lock:
        """Return the lock of the process for the creation of groups, see `create_together`."""
        with _lock:
            return _creation_locks.setdefault(dist.group.WORLD, threading.Lock())

    def would_create(self, ranks: Ranks) -> bool:
        """Return whether `get_or_create` would create a group."""
        if not self.dedicated and ranks in self.existing or ranks in self.created:
            return False
        return self.dedicated or not self._created_before(ranks)

    def find_any_order(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """Return the existing group of `ranks` in any order, even with a slow timeout; None without
        such a group. Never raises.
        """
        return self.templates.get(frozenset(ranks))

    def get_dedicated_or_shared(self, ranks: Ranks) -> dist.ProcessGroup:
        """Return the dedicated group of `ranks` if there is one, else the shared group. For
        collectives between ranks that never ran the plan check together (spreading NaN flags).
        """
        return (
            self.shared_groups().get_or_create(ranks)
            if self.dedicated and ranks not in self.created
            else self.get_or_create(ranks)
        )

    def idle_flags(self, ranks: Ranks) -> list[bool]:
        """Return for each earlier dedicated group of `ranks` whether no optimizer of the process
        uses the group. The list has an equal length on all ranks, since ranks create groups
        together. [] if nothing is to choose.
        """
        return (
            [entry.idle for entry in self._created_before(ranks)]
            if self.dedicated and ranks not in self.created
            else []
        )

    def reuse_idle(self, ranks: Ranks, over: dist.ProcessGroup, device: torch.device) -> None:
        """Reuse a dedicated process group released by an earlier optimizer, if the group is idle on
        all ranks: ranks do not release optimizers at the same time. Collective over `over`, a group
        of the same ranks.
        """
        if idle := self.idle_flags(ranks):
            flags = torch.tensor(idle, dtype=torch.float32, device=device)
            dist.all_reduce(flags, dist.ReduceOp.MIN, group=over)
            if 1.0 in (flags := flags.tolist()):
                self.reuse(ranks, flags.index(1.0))

    def reuse(self, ranks: Ranks, index: int) -> None:
        """Use the dedicated group at `index` of `idle_flags` from now on."""
        self._use(ranks, self._created_before(ranks)[index])

    def _use(self, ranks: Ranks, entry: CreatedGroup) -> None:
        """Use a created group for `ranks`."""
        self.created[ranks] = entry
        entry.idle = False

    def release(self) -> None:
        """Release dedicated groups for reuse by later optimizers, see [Note: lifetime of created
        groups].
        """
        # After a failed step a collective that other ranks do not know of may still be in flight
        for entry in self.created.values() if self.dedicated else ():
            entry.idle = self.is_step_complete
        self.created = {}

    def __del__(self) -> None:
        """Release dedicated groups when the optimizer dies."""
        self.release()

    def shared_groups(self) -> ProcessGroups:
        """Return a copy that uses shared groups instead of dedicated groups; ranks agree on
        dedicated groups through them.
        """
        copy = ProcessGroups()
        copy.existing = self.existing
        copy.templates = self.templates
        copy.slow_timeout = self.slow_timeout
        return copy

    def _template(self, ranks: Ranks) -> dist.ProcessGroup:
        """Return the existing group of `ranks` in any order, else the default group."""
        return self.templates.get(frozenset(ranks), dist.group.WORLD)

    def _timeout(self, ranks: Ranks) -> datetime.timedelta | None:
        """Return the timeout of a new group of `ranks`: the timeout of the template, or of the
        default group if shorter.
        """
        return timeout_of(
            dist.group.WORLD if frozenset(ranks) in self.slow_timeout else self._template(ranks)
        )

    def _created_before(self, ranks: Ranks) -> list[CreatedGroup]:
        """Return the groups created by this process with equal ranks, template, backends and
        timeout, in order of creation. Every rank creates the groups of a template in an equal
        order, since only a single thread at a time may use the template.
        """
        template = self._template(ranks)
        backends = dist.get_backend_config(template)
        key = self.dedicated, ranks, template.group_name, backends, self._timeout(ranks)
        # torch keeps groups until the default group is destroyed, so the table is keyed by that
        with _lock:
            return _created.setdefault(dist.group.WORLD, {}).setdefault(key, [])

    def can_send_once(self, device: torch.device) -> bool:
        """Return whether an all-to-all can send a part of the send buffer to several ranks: NCCL
        can, gloo cannot.
        """
        return bool(self.backends) and all(
            f"{device.type}:nccl" in backends for backends in self.backends
        )

    def check_capturable(self) -> None:
        """Raise ValueError if a CUDA graph cannot hold the collectives of a group in use."""
        for ranks in sorted(self.used):
            backends = dist.get_backend_config(self.get_or_create(ranks))
            if "cuda:nccl" not in backends:
                raise ValueError(
                    f"capturable=True is not allowed: the process group of ranks {ranks} has the "
                    f"backends {backends}, and CUDA graphs hold collectives of NCCL only: "
                    "initialize it with nccl, or leave capturable out"
                )


@dataclass
class CreatedGroup:
    """A created group. `idle`: no optimizer of this process uses the group, and no collective is in
    flight.
    """

    group: dist.ProcessGroup
    idle: bool = False


# Default group -> {key of `_created_before`: [CreatedGroup]}
_created = weakref.WeakKeyDictionary()
_creation_locks = weakref.WeakKeyDictionary()  # default group -> lock, see `creation_lock`
# Guards the tables of this module. Never held while the thread waits for another rank: ranks take
# their locks in different orders.
_lock = threading.Lock()
# A generator of its own: with a common seed of the user all ranks would get equal pauses
_pause = random.Random()


def _meshes_groups(params: list[torch.Tensor]) -> set[dist.ProcessGroup]:
    """Return the process groups of all mesh axes. The order of the set differs between ranks."""
    meshes = {p.device_mesh for p in params if is_dtensor(p)}
    return {mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)}


def _default_and_given(process_group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Return the default group, then the user's: in a dict by ranks, the user's wins."""
    return [group for group in (world_now(), process_group) if group is not None]


def _ranks_of(group: dist.ProcessGroup) -> Ranks:
    """Return the global ranks of a group, in its order."""
    return tuple(dist.get_process_group_ranks(group))


def _is_slow(group: dist.ProcessGroup, device: str) -> bool:
    """Return whether collectives in `group` time out later than in the default group. `device`:
    type of the device; False unless "cpu". False if a backend does not tell a timeout.
    """
    timeout = timeout_of(group)
    default = timeout_of(dist.group.WORLD)
    return device == "cpu" and None not in (timeout, default) and timeout > default


def _new(
    ranks: tuple, template: dist.ProcessGroup, timeout: datetime.timedelta | None
) -> dist.ProcessGroup:
    """Create a group with the backends of `template` and a given timeout. Waits for all `ranks`."""
    # None: new_group copies the backends of the default group
    backends = None if template is dist.group.WORLD else dist.get_backend_config(template)
    # torch 2.11 has no argument `sort_ranks` and always sorts
    order = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    with _lock:
        _name_by_ranks()
    _thread.template = template.group_name
    try:
        with _unbound(dist.group.WORLD) as device:
            more = order | _binding(template, device)
            return dist.new_group(
                list(ranks), timeout, backends, use_local_synchronization=True, **more
            )
    finally:
        _thread.template = None


def _binding(template: dist.ProcessGroup, device: torch.device | None) -> dict[str, torch.device]:
    """Arguments of `new_group` that bind a group like `template` to `device`, the device of the
    default group. {} for backends that take the device from the tensors that are sent.
    """
    # The default NCCL backend since torch 2.15. Without a device it takes one by LOCAL_RANK or by
    # the rank, which may be another device than the user's.
    bound = getattr(dist.distributed_c10d, "ProcessGroupNCCL2", None)
    if device is None or bound is None:
        return {}
    with contextlib.suppress(RuntimeError):  # no backend for this type of device
        if isinstance(template._get_backend(device), bound):
            return {"device_id": device}
    return {}


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """Context manager in which the default group is bound to no device. Gives the device to which
    it was bound, None if to no device.

    From a bound default group (init_process_group with device_id) torch splits NCCL's communicator
    for a new group, and NCCL waits for all ranks instead of the members. Several threads may be
    inside at once: the last to leave binds the group again.
    """
    with _lock:
        device = getattr(world, "bound_device_id", None)
        if device is not None:
            _unbound_worlds[world] = [device, 0]
        # Another thread may have unbound the group already: then `device` is None
        entry = _unbound_worlds.get(world)
        if entry is not None:
            world.bound_device_id = None
            entry[1] += 1
    try:
        yield None if entry is None else entry[0]
    finally:
        with _lock:
            if entry is not None:
                entry[1] -= 1
            if entry is not None and entry[1] == 0:
                world.bound_device_id = entry[0]
                del _unbound_worlds[world]


# Default group -> [device that it was bound to, number of threads that are creating a group]
_unbound_worlds = weakref.WeakKeyDictionary()


def world_now() -> dist.ProcessGroup | None:
    """Return the default process group, None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def gather_integers(
    numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """Return the numbers of every rank of `group`, by rank of the group. Every rank passes equally
    many, each a signed 64-bit integer. `device`: one that the group's backend can send from.
    Collective (an all-gather); waits for the device.
    """
    row = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return [row.tolist() for row in rows]


def check_process_group(world: dist.ProcessGroup | None, was_world: bool) -> None:
    """Raise RuntimeError for a destroyed `process_group`, unless the user gave the default group
    and a new default group exists.
    """
    if world is None or not was_world:
        raise RuntimeError(
            "process_group was destroyed since the optimizer was built; build another one with a "
            "group of now, and load this one's state_dict() into it"
        )


def found_again(choice: Choice, world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The new default group in place of a destroyed process group. Raises RuntimeError if the
    destroyed group was not the default group.
    """
    check_process_group(world, choice.is_world)
    return world


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return the timeout of a process group, None if the backend does not tell. New groups do not
    inherit timeouts.
    """
    # Private attributes of torch, which some backends lack
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


# `template`: name of the template of the group that this thread is creating, else None
_thread = threading.local()


@functools.cache
def _name_by_ranks() -> None:
    """Patch torch so that the name of a new group depends on its ranks and its template only.

    torch (2.11 to 2.15) puts the number of groups of the process into the name. Ranks with
    different numbers of groups would wait for each other under different names.
    """
    c10d = dist.distributed_c10d
    torch_name = c10d._hash_ranks_to_str

    def name(ranks: Ranks) -> str:
        """Return the name of a new group of `ranks`."""
        template = getattr(_thread, "template", None)
        # Groups of other code keep torch's names
        if template is None:
            return torch_name(ranks)
        return _free_name(ranks, template, list(c10d._world.pg_names.values()))

    c10d._hash_ranks_to_str = name


def _free_name(ranks: Ranks, template: str, taken: list[str]) -> str:
    """Return the first name for the ranks and template without a group. All ranks create groups of
    a template in an equal order, so the names agree.
    """
    texts = (repr((list(ranks), template, number)) for number in itertools.count())
    names = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return next(name for name in names if name not in taken)

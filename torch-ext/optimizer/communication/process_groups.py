"""The process group of each set of ranks. Creates missing groups; issues no collective of a
step.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import threading
import weakref
from dataclasses import dataclass
from operator import attrgetter

import torch.distributed as dist

from ..params.dtensor import is_dtensor, local_of


class ProcessGroups:
    """The process group of each set of ranks: one that is there already (the default, a mesh's),
    else a new one.

    `dedicated`: new ones only. During backward the model's collectives are on their way too, and not
    every rank has the same buckets leave between the same two of them; during forward they would
    wait for all of the step's in one group.

    torch keeps a group until the default one goes, and NCCL's cannot be destroyed at any time: so
    new ones are shared by all optimizers of the process; own ones when whoever had them is gone, if
    all ranks say so. `is_step_complete`: whether a step has been finished since something was sent, else there
    may be a collective that other ranks do not know of.

    Optimizers may step in several threads, if each has a process group or meshes of its own.
    Threads take turns in an order that differs between ranks. So a new group is named after the
    group whose pattern it has (`_template`), and is shared or used again only among optimizers with
    that pattern.

    `slow_timeout`: the sets of ranks, as tuples, that only groups of meshes connect whose timeout is
    longer than that of the default group. torch gives 30 minutes to gloo's groups of a mesh,
    whatever `init_process_group` was told. For these ranks `get_or_create` returns a new group with the
    timeout of the default one. Empty on GPUs, where the groups of meshes stay: a new one takes
    memory, and the host waits for none.
    """

    def __init__(self, dedicated=False):
        self.created, self.existing, self.templates, self.dedicated = {}, {}, {}, dedicated
        self.slow_timeout: set[frozenset] = set()  # sets of ranks
        self.used, self.connected, self.backends, self.is_step_complete = set(), set(), set(), False

    def begin_step(self) -> None:
        """Collectives of a step may be in flight from now on."""
        self.is_step_complete = False

    def end_step(self) -> None:
        """All collectives of the step have been issued, and none failed."""
        self.is_step_complete = True

    def find_existing(self, params, process_group) -> None:
        """Find the groups that all parameters of a step bring along, and forget which ones earlier
        plans used.

        Where several connect the same ranks (two meshes with an axis over them), all ranks choose
        the same: the user's `process_group`, else the default one, else the one whose name comes
        first.
        """
        self.used.clear()
        self.existing = {}
        for group in sorted(_meshes_groups(params), key=attrgetter("group_name")):
            self.existing.setdefault(_ranks_of(group), group)
        patterns = dict(self.existing)
        device = local_of(params[0]).device.type if params else ""
        patient = [ranks for ranks, group in patterns.items() if _is_slow(group, device)]
        for ranks in patient:
            del self.existing[ranks]
        self.existing |= {_ranks_of(group): group for group in _always(process_group)}
        # Its ranks may be in an order of their own, which no other group has
        if process_group is not None:
            ours = set(_ranks_of(process_group))
            self.existing = {
                ranks: group for ranks, group in self.existing.items() if set(ranks) != ours
            }
            self.existing[_ranks_of(process_group)] = process_group
        patterns |= self.existing
        self.templates = {frozenset(ranks): group for ranks, group in patterns.items()}
        self.slow_timeout = set(map(frozenset, patient)) - set(map(frozenset, self.existing))

    def find_backends(self, params, process_group) -> None:
        """From now on `send_once` speaks of the groups that these parameters bring along."""
        groups = [*_always(process_group), *_meshes_groups(params)]
        self.backends = {dist.get_backend_config(group) for group in groups}

    def get_or_create(self, ranks):
        """All ranks of the group call this in the same order, since all have the same plan."""
        self.used.add(ranks)
        if not self.dedicated and ranks in self.existing:
            return self.existing[ranks]
        if ranks not in self.created:
            before = self._created_before(ranks)
            if self.dedicated or not before:
                made = CreatedGroup(_new(ranks, self._template(ranks), self._timeout(ranks)))
                before.append(made)
            else:
                made = before[-1]
            self._use(ranks, made)
        return self.created[ranks].group

    def creation_lock(self) -> threading.Lock:
        """The lock of this process that a thread holds while it makes a group, see `check_plans`."""
        with _lock:
            return _creation_locks.setdefault(dist.group.WORLD, threading.Lock())

    def would_create(self, ranks: tuple) -> bool:
        """Whether `get_or_create` would make a group."""
        if not self.dedicated and ranks in self.existing or ranks in self.created:
            return False
        return self.dedicated or not self._created_before(ranks)

    def find_any_order(self, ranks: tuple) -> dist.ProcessGroup | None:
        """The group of these ranks, in any order, that `find_existing` found: a mesh's, also one that is
        not used for its timeout, the default group or the user's. None where there is none; never
        raises.
        """
        return self.templates.get(frozenset(ranks))

    def get_dedicated_or_shared(self, ranks):
        """The same for ranks that may share no plan, and have not agreed on a group of their own:
        the shared one.
        """
        return (
            self.shared_groups().get_or_create(ranks)
            if self.dedicated and ranks not in self.created
            else self.get_or_create(ranks)
        )

    def idle_flags(self, ranks) -> list[bool]:
        """Of the groups of these ranks that were made before, which ones this rank has no use for:
        as many on each of them, for these make them together. Empty where there is nothing to
        choose.
        """
        return (
            [made.idle for made in self._created_before(ranks)]
            if self.dedicated and ranks not in self.created
            else []
        )

    def reuse(self, ranks, number) -> None:
        """Have one of them, by its number, from now on."""
        self._use(ranks, self._created_before(ranks)[number])

    def _use(self, ranks: tuple, made: CreatedGroup) -> None:
        self.created[ranks] = made
        made.idle = False

    def release(self) -> None:
        """Leave own groups to others."""
        for made in self.created.values() if self.dedicated else ():
            made.idle = self.is_step_complete
        self.created = {}

    def __del__(self):
        self.release()

    def shared_groups(self):
        """The same without groups of its own, in which ranks choose one of these."""
        others = ProcessGroups()
        others.existing, others.templates, others.slow_timeout = (
            self.existing,
            self.templates,
            self.slow_timeout,
        )
        return others

    def _template(self, ranks):
        return self.templates.get(frozenset(ranks), dist.group.WORLD)

    def _timeout(self, ranks: tuple) -> datetime.timedelta | None:
        """The timeout of a new group of these ranks: that of its pattern, or of the default group
        if that is shorter.
        """
        return timeout_of(
            dist.group.WORLD if frozenset(ranks) in self.slow_timeout else self._template(ranks)
        )

    def _created_before(self, ranks) -> list:
        """All that this process has made of one kind, in the order in which it did. Every rank
        makes those of one pattern in one order, since only one thread at a time may use the
        pattern.
        """
        pattern = self._template(ranks)
        backends, timeout = dist.get_backend_config(pattern), self._timeout(ranks)
        kind = self.dedicated, ranks, pattern.group_name, backends, timeout
        with _lock:
            return _created.setdefault(dist.group.WORLD, {}).setdefault(kind, [])

    def send_once(self, device) -> bool:
        """Whether a collective can send one place to several ranks: NCCL's can, gloo's cannot."""
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
                    "backends "
                    f"{backends}, and CUDA graphs hold collectives of NCCL only: initialize it "
                    "with nccl, "
                    "or leave capturable out"
                )


@dataclass
class CreatedGroup:
    """A group that was made here; `idle`: no optimizer of this process has it, and nothing is under
    way in it.
    """

    group: dist.ProcessGroup
    idle: bool = False


_created = weakref.WeakKeyDictionary()  # default group -> {what a group is like: [CreatedGroup]}
_creation_locks = weakref.WeakKeyDictionary()  # default group -> lock
# of the tables of this module; never held while another rank is waited for
_lock = threading.Lock()


def _meshes_groups(params) -> set:
    """The groups of the axes of all meshes, in an order that differs between ranks."""
    meshes = {p.device_mesh for p in params if is_dtensor(p)}
    return {mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)}


def _always(process_group) -> list:
    """The groups that are there whatever the parameters are; the later one counts."""
    return [group for group in (world_now(), process_group) if group is not None]


def _ranks_of(group) -> tuple:
    return tuple(dist.get_process_group_ranks(group))


def _is_slow(group: dist.ProcessGroup, device: str) -> bool:
    """Whether collectives in `group` wait longer than those in the default group. False unless
    `device`, a type, is "cpu", and where a backend does not say its timeout.
    """
    mine, worlds = timeout_of(group), timeout_of(dist.group.WORLD)
    return device == "cpu" and None not in (mine, worlds) and mine > worlds


def _new(
    ranks: tuple, pattern: dist.ProcessGroup, timeout: datetime.timedelta | None
) -> dist.ProcessGroup:
    """A group with the backends of another one, the `pattern`, and the given timeout. Waits for all
    `ranks`.
    """
    backends = dist.get_backend_config(pattern)
    backends = None if pattern is dist.group.WORLD else backends
    # Which torch 2.11 has not: it sorts all
    order = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    with _lock:
        _name_by_ranks()
    _making.pattern = pattern.group_name
    try:
        with _unbound(dist.group.WORLD):
            return dist.new_group(
                list(ranks), timeout, backends, use_local_synchronization=True, **order
            )
    finally:
        _making.pattern = None


@contextlib.contextmanager
def _unbound(world):
    """Meanwhile the default group is bound to no device. From one that is (init_process_group with
    device_id), torch splits NCCL's communicator for a new group, for which NCCL waits for all
    ranks, not only for the members.

    Several threads may be inside at once: the last one to leave binds the group again.
    """
    with _lock:
        device = getattr(world, "bound_device_id", None)
        if device is not None:
            _unbinding[world] = [device, 0]
        entry = _unbinding.get(world)
        if entry is not None:
            world.bound_device_id = None
            entry[1] += 1
    try:
        yield
    finally:
        with _lock:
            if entry is not None:
                entry[1] -= 1
            if entry is not None and entry[1] == 0:
                world.bound_device_id = entry[0]
                del _unbinding[world]


# default group -> [its device, how many threads are making a group]
_unbinding = weakref.WeakKeyDictionary()


def world_now():
    """The default process group, None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def check_process_group(world, was_world) -> None:
    """Raise RuntimeError unless the option process_group, which was destroyed, `was_world` and
    there is another one.
    """
    if world is None or not was_world:
        raise RuntimeError(
            "process_group was destroyed since the optimizer was built; build another one with a "
            "group "
            "of now, and load this one's state_dict() into it"
        )


def timeout_of(group):
    """That of a process group, which new ones do not inherit; None where a backend has none."""
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


# `pattern`: the name of the pattern of the group that this thread is making
_making = threading.local()


@functools.cache
def _name_by_ranks() -> None:
    """Have the ranks of a new group find each other by its ranks and the name of its pattern.

    torch (2.11 to 2.13) puts the number of groups that each of them has into the name, and ranks
    that are in different numbers of groups wait for each other under different names.
    """
    c10d = dist.distributed_c10d
    torchs = c10d._hash_ranks_to_str

    def name(ranks):
        pattern = getattr(_making, "pattern", None)
        if pattern is None:
            return torchs(ranks)
        return _free_name(ranks, pattern, list(c10d._world.pg_names.values()))

    c10d._hash_ranks_to_str = name


def _free_name(ranks, pattern: str, taken) -> str:
    """The first name of these ranks and this pattern that no group has yet; they make their groups
    in the same order.
    """
    texts = (repr((list(ranks), pattern, number)) for number in itertools.count())
    names = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return next(name for name in names if name not in taken)

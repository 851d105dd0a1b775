"""Which process group connects a set of ranks. Makes what is missing; issues no collective of a step."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import threading
import weakref
from dataclasses import dataclass
from operator import attrgetter

import torch.distributed as dist

from .layout import is_dtensor


class ProcessGroups:
    """The process group of each set of ranks: one that is there already (the default, a mesh's), else a new one.

    `own`: new ones only. During backward the model's collectives are on their way too, and not every rank has the same
    buckets leave between the same two of them; during forward they would wait for all of the step's in one group.

    torch keeps a group until the default one goes, and NCCL's cannot be destroyed at any time: so new ones are shared
    by all optimizers of the process; own ones when whoever had them is gone, if all ranks say so. `quiet`: whether a
    step has been finished since something was sent, else there may be a collective that other ranks do not know of.
    """

    def __init__(self, own=False):
        self.made, self.theirs, self.patterns, self.own = {}, {}, {}, own
        self.used, self.connected, self.backends, self.quiet = set(), set(), set(), False

    def learn(self, params, process_group) -> None:
        """Find the groups that all parameters of a step bring along, and forget which ones earlier plans used.

        Where several connect the same ranks (two meshes with an axis over them), all ranks choose the same: the user's
        `process_group`, else the default one, else the one whose name comes first.
        """
        self.used.clear()
        self.theirs = {}
        for group in sorted(_meshes_groups(params), key=attrgetter("group_name")):
            self.theirs.setdefault(_ranks_of(group), group)
        self.theirs |= {_ranks_of(group): group for group in _always(process_group)}
        if process_group is not None:  # its ranks may be in an order of their own, which no other group has
            ours = set(_ranks_of(process_group))
            self.theirs = {ranks: group for ranks, group in self.theirs.items() if set(ranks) != ours}
            self.theirs[_ranks_of(process_group)] = process_group
        self.patterns = {frozenset(ranks): group for ranks, group in self.theirs.items()}

    def expect(self, params, process_group) -> None:
        """From now on `send_once` speaks of the groups that these parameters bring along."""
        groups = [*_always(process_group), *_meshes_groups(params)]
        self.backends = {dist.get_backend_config(group) for group in groups}

    def of(self, ranks):
        """All ranks of the group call this in the same order, since all have the same plan."""
        self.used.add(ranks)
        if not self.own and ranks in self.theirs:
            return self.theirs[ranks]
        if ranks not in self.made:
            made = self._made_before(ranks)
            if self.own or not made:
                made.append(Made(_new(ranks, self._pattern(ranks))))
            self.take(ranks, -1)
        return self.made[ranks].group

    def at_hand(self, ranks):
        """The same for ranks that may share no plan, and have not agreed on a group of their own: the shared one."""
        return self.shared().of(ranks) if self.own and ranks not in self.made else self.of(ranks)

    def idle(self, ranks) -> list[bool]:
        """Of the groups of these ranks that were made before, which ones this rank has no use for: as many on each of
        them, for these make them together. Empty where there is nothing to choose.
        """
        return [made.idle for made in self._made_before(ranks)] if self.own and ranks not in self.made else []

    def take(self, ranks, number) -> None:
        """Have one of them, by its number, from now on."""
        self.made[ranks] = self._made_before(ranks)[number]
        self.made[ranks].idle = False

    def release(self) -> None:
        """Leave own groups to others."""
        for made in self.made.values() if self.own else ():
            made.idle = self.quiet
        self.made = {}

    def __del__(self):
        self.release()

    def shared(self):
        """The same without groups of its own, in which ranks choose one of these."""
        others = ProcessGroups()
        others.theirs, others.patterns = self.theirs, self.patterns
        return others

    def _pattern(self, ranks):
        return self.patterns.get(frozenset(ranks), dist.group.WORLD)

    def _made_before(self, ranks) -> list:
        """All that this process has made of one kind, in the order in which it did."""
        pattern, before = self._pattern(ranks), _made.setdefault(dist.group.WORLD, {})
        return before.setdefault((self.own, ranks, dist.get_backend_config(pattern), _timeout(pattern)), [])

    def send_once(self, device) -> bool:
        """Whether a collective can send one place to several ranks: NCCL's can, gloo's cannot."""
        return bool(self.backends) and all(f"{device.type}:nccl" in backends for backends in self.backends)

    def check_capturable(self) -> None:
        """Raise ValueError if a CUDA graph cannot hold the collectives of a group in use."""
        for ranks in sorted(self.used):
            backends = dist.get_backend_config(self.of(ranks))
            if "cuda:nccl" not in backends:
                raise ValueError(f"capturable=True is not allowed: the process group of ranks {ranks} has the backends "
                                 f"{backends}, and CUDA graphs hold collectives of NCCL only: initialize it with nccl, "
                                 "or leave capturable out")


@dataclass
class Made:
    """A group that was made here; `idle`: no optimizer of this process has it, and nothing is under way in it."""
    group: dist.ProcessGroup
    idle: bool = False


_made = weakref.WeakKeyDictionary()  # default group -> {what a group is like: [Made]}


def _meshes_groups(params) -> set:
    """The groups of the axes of all meshes, in an order that differs between ranks."""
    meshes = {p.device_mesh for p in params if is_dtensor(p)}
    return {mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)}


def _always(process_group) -> list:
    """The groups that are there whatever the parameters are; the later one counts."""
    return [group for group in (world_now(), process_group) if group is not None]


def _ranks_of(group) -> tuple:
    return tuple(dist.get_process_group_ranks(group))


def _new(ranks, pattern):
    """A group with the backends and the timeout of another one."""
    backends, timeout = dist.get_backend_config(pattern), _timeout(pattern)
    backends = None if pattern is dist.group.WORLD else backends
    order = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}  # which torch 2.11 has not: it sorts all
    _name_by_ranks()
    _making.ours = True
    try:
        with _unbound(dist.group.WORLD):
            return dist.new_group(list(ranks), timeout, backends, use_local_synchronization=True, **order)
    finally:
        _making.ours = False


@contextlib.contextmanager
def _unbound(world):
    """Meanwhile the default group is bound to no device. From one that is (init_process_group with device_id), torch
    splits NCCL's communicator for a new group, for which NCCL waits for all ranks, not only for the members.
    """
    if (device := getattr(world, "bound_device_id", None)) is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def world_now():
    """The default process group, None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def check_process_group(world, was_world) -> None:
    """Raise RuntimeError unless the option process_group, which was destroyed, `was_world` and there is another one."""
    if world is None or not was_world:
        raise RuntimeError("process_group was destroyed since the optimizer was built; build another one with a group "
                           "of now, and load this one's state_dict() into it")


def _timeout(group):
    """That of a process group, which new ones do not inherit; None where a backend has none."""
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


_making = threading.local()


@functools.cache
def _name_by_ranks() -> None:
    """Have the ranks of a new group find each other by its ranks alone.

    torch (2.11 to 2.13) puts the number of groups that each of them has into the name, and ranks that are in different
    numbers of groups wait for each other under different names.
    """
    c10d = dist.distributed_c10d
    torchs = c10d._hash_ranks_to_str

    def name(ranks):
        return _free_name(ranks, c10d._world.pg_names.values()) if getattr(_making, "ours", False) else torchs(ranks)

    c10d._hash_ranks_to_str = name


def _free_name(ranks, taken) -> str:
    """The first name of these ranks that no group has yet; they make their groups in the same order."""
    names = (hashlib.sha256(repr((list(ranks), number)).encode()).hexdigest() for number in itertools.count())
    return next(name for name in names if name not in taken)

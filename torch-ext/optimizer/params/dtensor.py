"""Local tensors and metadata of DTensors, without communication and without DTensor's dispatch.

DTensor's own operators cost much host time; the functions of this module read private attributes of
torch instead. All functions but `as_dtensor` accept plain tensors, too. The module of DTensor is
imported only where a DTensor exists or is made: importing is slow.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}  # exact types that are never DTensors
_placements = attrgetter("_spec.placements")  # placements of a DTensor, read in C


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor."""
    # While the module of DTensor has not been imported, no DTensor can exist
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, or a plain tensor, detached from autograd; shares memory with
    `tensor`.
    """
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()


def raw_locals(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The local shards of DTensors, and plain tensors and None unchanged, in order.

    Not detached from autograd: for reading addresses and metadata only, at every step.
    """
    tensors = list(tensors)
    module = sys.modules.get("torch.distributed.tensor")
    types = set(map(type, tensors))
    # The first two cases, the usual ones, run in C: a steady step executes no Python per parameter
    # (tests/test_steady.py).
    if module is None or types <= PLAIN:
        return tensors
    if types <= {module.DTensor, *PLAIN}:
        # getattr's default returns plain tensors unchanged
        return list(map(getattr, tensors, itertools.repeat("_local_tensor"), tensors))
    return [t._local_tensor if isinstance(t, module.DTensor) else t for t in tensors]


def placements_of(tensors: Iterable[torch.Tensor | None]) -> list[tuple[Placement, ...]]:
    """The placements of all DTensors among `tensors`, in order; plain tensors and None are skipped.

    Used for gradients, whose placements autograd chooses anew in every backward.
    """
    tensors = list(tensors)
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or set(map(type, tensors)) <= PLAIN:
        return []
    are_dtensors = map(isinstance, tensors, itertools.repeat(module.DTensor))
    return list(map(_placements, itertools.compress(tensors, are_dtensors)))


def is_mismatched(param: torch.Tensor) -> bool:
    """Whether a DTensor parameter has a gradient with placements unlike the parameter's.

    Autograd leaves for example Partial gradients of norms under SequenceParallel. A plain gradient
    of a DTensor counts as mismatched, too.
    """
    grad = param.grad
    return (
        is_dtensor(param)
        and grad is not None
        and getattr(grad, "placements", None) != param.placements
    )


def mismatched_placements(
    params: Sequence[torch.Tensor],
) -> dict[int, tuple[Placement, ...] | None]:
    """{index in `params`: placements of the gradient} of all parameters for which `is_mismatched`.
    A plain gradient of a DTensor has the placements None.
    """
    return {
        i: getattr(p.grad, "placements", None) for i, p in enumerate(params) if is_mismatched(p)
    }


def properties_of(param: torch.Tensor) -> tuple:
    """Shape, dtype, device and DTensor spec (None for a plain tensor): the properties of a
    parameter on which a plan depends.

    A new memory address leaves the tuple equal; resharding, resizing or casting changes the tuple.
    """
    return param.shape, param.dtype, param.device, param._spec if is_dtensor(param) else None


def zeros_of(
    param: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Zeros with the shape, placements and strides of `param`, in `dtype`, outside autograd.
    `device`: of the local tensor; None: the parameter's.
    """
    # DTensor's own zeros_like takes milliseconds
    zeros = torch.zeros_like(local_of(param), dtype=dtype, requires_grad=False, device=device)
    if not is_dtensor(param):
        return zeros
    if device is not None:
        return with_local(param, zeros)
    return as_dtensor(zeros, param.shape, param.device_mesh, param.placements, param.stride())


def as_dtensor(
    local: torch.Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """Make the DTensor of global `shape` whose shard on this rank is `local`, without communication
    and checks.

    stride: global strides in elements; None: those of a contiguous tensor.
    """
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def as_shard_like(
    local: torch.Tensor, other: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """`local` as the shard on this rank of a DTensor of global `shape` with mesh and placements of
    `other`; unchanged if `other` is a plain tensor. Nothing is sent.
    """
    if not is_dtensor(other):
        return local
    return as_dtensor(local, shape, other.device_mesh, other.placements)


def with_shard(like: DTensor, local: torch.Tensor) -> DTensor:
    """`local`, on a device of the mesh, as the shard of a DTensor of the shape and placements of
    `like`. If `local` has the dtype of `like`, the result shares the spec of `like`, its global
    strides included: far faster than a new spec, with strides of a contiguous tensor.
    """
    if local.dtype != like.dtype:
        return as_dtensor(local, like.shape, like.device_mesh, like.placements)
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=False)


def with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """Make the DTensor with the global shape and placements of `like` whose shard on this rank is
    `local`, in its own dtype and on any device: the devices of the mesh, or the host.
    """
    from torch.distributed.tensor import DTensor

    # A shard on the host would be copied to the devices of the mesh, a shard without memory is not
    empty = torch.empty_like(local, device="meta")
    spec = as_dtensor(empty, like.shape, like.device_mesh, like.placements, like.stride())._spec
    if not local.storage_offset():
        return DTensor(local, spec, requires_grad=False)
    # torch gives a DTensor the storage offset of its shard, but no storage. `copy.deepcopy` raises
    # for a DTensor with an offset (torch 2.13), so the shard gets its memory after the DTensor
    sizes, strides = local.shape, local.stride()
    shard = torch.empty_strided(sizes, strides, dtype=local.dtype, device=local.device)
    found = DTensor(shard, spec, requires_grad=False)
    shard.set_(local)
    return found


def on_mesh_device(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor with its shard on a device of its mesh, for collectives; else unchanged."""
    if not is_dtensor(tensor) or tensor.device.type == tensor.device_mesh.device_type:
        return tensor
    return tensor.to(tensor.device_mesh.device_type)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements of memory from the first to the last element of a strided tensor; 0
    for a tensor without elements.
    """
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def this_rank() -> int:
    """The global rank of the process; 0 if torch.distributed is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def once_per_mesh(function: Callable) -> Callable:
    """Decorator of a function of a mesh: one call for equal meshes on a rank. torch computes
    `DeviceMesh.mesh` anew at each read, and thousands of parameters lie on one mesh of thousands of
    ranks. The result must not be changed.
    """
    known = weakref.WeakKeyDictionary()  # mesh -> {rank of this process: result}

    @functools.wraps(function)
    def cached(mesh: DeviceMesh) -> object:
        # The ranks of a submesh are those around this rank, and `==` of meshes does not compare
        # them. A process that joins another job may have another rank
        rank = this_rank()
        found = known.setdefault(mesh, {})
        if rank not in found:
            # `DeviceMesh.mesh` is a real tensor: see [Note: FakeTensorMode] in layout.py
            with no_dispatch():
                found[rank] = function(mesh)
        return found[rank]

    return cached


@once_per_mesh
def mesh_coordinates(mesh: DeviceMesh) -> Mapping[int, tuple[int, ...]]:
    """The coordinate of each global rank of a mesh, row-major, from the mesh's ranks."""
    ranks = mesh.mesh
    coordinates = itertools.product(*map(range, ranks.shape))
    return MappingProxyType(dict(zip(ranks.flatten().tolist(), coordinates)))


def is_by_rows(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether `tensor` is a DTensor with dim 0 sharded over the ranks of `group`, in group order.

    State dicts hold owner state in this form (communication/redistribute.py, `by_rows`).
    """
    if (
        not is_dtensor(tensor)
        or tensor.device_mesh.ndim != 1
        or not tensor.placements[0].is_shard(0)
    ):
        return False
    return list(mesh_coordinates(tensor.device_mesh)) == dist.get_process_group_ranks(group)


def is_placed_like(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether every rank stores the elements of `value` at the indices of its elements of `param`:
    both plain, or both DTensors with equal placements on meshes of equal ranks.
    """
    if not (is_dtensor(value) and is_dtensor(param)):
        return is_dtensor(value) == is_dtensor(param)
    # Meshes that differ only in the names of their dims place elements alike, so the ranks are
    # compared, not the meshes.
    ours, theirs = param.device_mesh, value.device_mesh
    return value.placements == param.placements and (
        ours is theirs or torch.equal(ours.mesh, theirs.mesh)
    )


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype in which all ranks exchange the gradient of `param`.

    Depends on the parameter alone: a rank without a gradient uses an equal dtype.
    """
    # `grad_dtype` exists from torch 2.10 on. None means that gradients of any dtype are accepted:
    # then fp32 at least.
    dtype = getattr(param, "grad_dtype", param.dtype)
    return dtype or torch.promote_types(param.dtype, torch.float32)

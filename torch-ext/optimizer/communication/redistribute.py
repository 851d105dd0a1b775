"""Redistribution of DTensors to other placements. Collective over the mesh of the parameter.

`to_parameter_placements`: a mismatched gradient. `place_like`: state of a checkpoint or of a
parameter with new placements. `by_rows`: the DTensor of row-sharded state. `sharded_view`: the
DTensor of a plain shard. Placements are named in params/layout.py and in this module only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..params.dtensor import as_dtensor, is_dtensor, is_placed_like, on_mesh_device
from ..params.layout import local_layout, this_rank, unsupported_sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def to_parameter_placements(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the local part of a gradient with mismatched placements, redistributed to the
    placements of `param`. Collective over the parameter's mesh.

    Raises RuntimeError for a plain gradient and for a gradient on a different mesh.
    """
    if not is_dtensor(grad):
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is a plain tensor of shape "
            f"{tuple(grad.shape)}, but the parameter a DTensor: use DTensor.from_local or "
            "distribute_tensor on the gradient"
        )
    if grad.device_mesh != param.device_mesh:
        raise RuntimeError(
            f"it is on another device mesh than the parameter: {grad.device_mesh} in place of "
            f"{param.device_mesh}; redistribute it to the parameter's mesh"
        )
    local = grad.redistribute(placements=param.placements).to_local()
    # The local tensor may be a view into a larger buffer, at any address
    return local.clone(memory_format=torch.contiguous_format)


def by_rows(local: torch.Tensor, shape: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the DTensor of global `shape` whose dim 0 is sharded over the ranks of `group`;
    `local`: rows of this rank.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    return as_dtensor(local, shape, DeviceMesh.from_group(group, local.device.type), [Shard(0)])


def sharded_view(
    local: torch.Tensor, mesh: DeviceMesh, dims: Sequence[int | None] = (0,), parts: int = 1
) -> nn.Parameter:
    """Return a DTensor parameter whose shard on this rank is the plain tensor `local`, in the same
    memory: for tensor parallelism with plain tensors, as in Megatron. Copies and sends nothing.

    mesh: the ranks that together hold the parameter. dims: for each axis of `mesh`, the dim that
    the axis shards, or None for copies. parts: number of matrices that are fused along the dim of
    the last axis, each of which the axis shards, such as 2 for gate and up. Shards must have equal
    shapes on all ranks, which is not checked. A new `local.data` is the new shard. The gradient of
    the parameter must be a DTensor of the same mesh and placements.

    Raises ValueError for dims that `local` or `mesh` does not have, and for parts that are no whole
    number or do not divide the shard.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    is_list = isinstance(dims, (tuple, list))
    # The type is compared too, since True == 1
    allowed = [None, *range(local.ndim)]
    known = is_list and all(dim is None or type(dim) is int and dim in allowed for dim in dims)
    if not known or len(dims) != mesh.ndim:
        raise ValueError(
            f"dims={dims!r} is not allowed for a shard of shape {tuple(local.shape)} on a mesh of "
            f"{mesh.ndim} axes: it must be a tuple with a dim of the shard, or None, for each axis"
        )
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    if type(parts) is not int:
        raise ValueError(f"parts={parts!r} is not allowed: it must be a whole number")
    if parts != 1:
        last = dims[-1]
        if last is None or dims.count(last) > 1 or parts < 1 or local.shape[last] % parts:
            raise ValueError(
                f"parts={parts} is not allowed for a shard of shape {tuple(local.shape)} and "
                f"dims={tuple(dims)}: the last axis alone must shard its dim, and parts must "
                "divide the shard along this dim"
            )
        placements[-1] = _StridedShard(last, split_factor=parts)
    sizes = dict.fromkeys(range(local.ndim), 1)
    for axis, dim in enumerate(dims):
        if dim is not None:
            sizes[dim] *= mesh.size(axis)
    shape = [n * sizes[dim] for dim, n in enumerate(local.shape)]
    view = nn.Parameter(as_dtensor(local.detach(), shape, mesh, placements))
    # The tensor itself, not a second view of its memory: Megatron offloads by assigning to `data`
    view._local_tensor = local
    return view


def place_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return `value` with the mesh and placements of `param`; a plain whole tensor for a plain
    `param`.

    `value`: of the parameter's global shape, or (..., R, 1) row state. A plain whole value is cut
    without communication. A DTensor with different placements is gathered first, by collectives.
    """
    if is_dtensor(value) and is_dtensor(param):
        if (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
            return value
        # The two meshes have equal ranks, and are different objects: no element moves
        if is_placed_like(value, param):
            return as_dtensor(value.to_local(), value.shape, param.device_mesh, param.placements)
    whole = _gathered(on_mesh_device(value)) if is_dtensor(value) else value
    if not is_dtensor(param):
        return whole
    # Placements that layout.py does not know are cut by torch
    if unsupported_sharding(param):
        local = _cut_by_torch(whole, param)
    else:
        local = local_layout(param, whole.shape).shard_of(whole, this_rank())
    return as_dtensor(local.to(param.device), whole.shape, param.device_mesh, param.placements)


def _cut_by_torch(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the local shard of `whole` for the placements of `param`, cut by torch's own code.

    For shardings not supported by `Layout`. Nothing is sent: `whole` is on every rank.
    """
    from torch.distributed.tensor import Replicate

    mesh = param.device_mesh
    # Redistribution from Replicate to Shard slices locally
    replicated = as_dtensor(whole.to(param.device), whole.shape, mesh, [Replicate()] * mesh.ndim)
    local = replicated.redistribute(placements=param.placements).to_local()
    return local.clone(memory_format=torch.contiguous_format)


def _gathered(value: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a DTensor. Collective."""
    if value.dtype != torch.int16:
        return value.full_tensor()
    # NCCL and gloo send no 16-bit integers
    bits = value.to_local().view(torch.bfloat16)
    return (
        as_dtensor(bits, value.shape, value.device_mesh, value.placements)
        .full_tensor()
        .view(torch.int16)
    )

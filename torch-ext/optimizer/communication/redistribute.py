"""DTensors moved to other placements. Collective over the mesh of the parameter."""

from __future__ import annotations

import torch

from ..params.dtensor import as_dtensor, is_dtensor, is_placed_like
from ..params.layout import _cut_by_torch, layout_of, this_rank, unsupported_sharding


def to_parameter_placements(param, grad) -> torch.Tensor:
    """The local part of a gradient that is astray, placed like its parameter; collective over the
    parameter's mesh.
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
    # It may be a part of a larger one, at any address
    return local.clone(memory_format=torch.contiguous_format)


def by_rows(local, shape, group):
    """The DTensor of a global `shape` whose dim 0 is cut over the ranks of a process group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    return as_dtensor(local, shape, DeviceMesh.from_group(group, local.device.type), [Shard(0)])


def place_like(value, param):
    """`value` (a tensor of `param`'s shape, or of (..., R, 1)) with its elements where `param` has
    them.

    Whole tensors are cut without communication; DTensors with other placements are gathered first,
    which is collective.
    """
    if is_dtensor(value) and is_dtensor(param):
        if (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
            return value
        if is_placed_like(value, param):  # on a mesh of the same ranks by another name
            return as_dtensor(value.to_local(), value.shape, param.device_mesh, param.placements)
    whole = value.full_tensor() if is_dtensor(value) else value
    if not is_dtensor(param):
        return whole
    if unsupported_sharding(param):
        local = _cut_by_torch(whole, param)
    else:
        local = layout_of(param, shape=whole.shape).cut(whole, this_rank())
    return as_dtensor(local.to(param.device), whole.shape, param.device_mesh, param.placements)

"""Redistribution of DTensors to other placements. Collective over the mesh of the parameter.

`to_parameter_placements`: a mismatched gradient. `place_like`: state of a checkpoint or of a
parameter with new placements. `by_rows`: the DTensor of row-sharded state. Placements are named in
params/layout.py and in this module only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..params.dtensor import as_dtensor, is_dtensor, is_placed_like, on_mesh_device
from ..params.layout import _cut_by_torch, layout_of, this_rank, unsupported_sharding


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


def place_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return `value` with the mesh and placements of `param`; a plain whole tensor for a plain
    `param`.

    `value`: of the parameter's global shape, or (..., R, 1) row state. A plain whole value is cut
    without communication. A DTensor with different placements is gathered first, by collectives.
    """
    if is_dtensor(value) and is_dtensor(param):
        if (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
            return value
        # On a mesh of equal ranks that is another object: no element moves
        if is_placed_like(value, param):
            return as_dtensor(value.to_local(), value.shape, param.device_mesh, param.placements)
    whole = on_mesh_device(value).full_tensor() if is_dtensor(value) else value
    if not is_dtensor(param):
        return whole
    # Placements that layout.py does not know are cut by torch
    if unsupported_sharding(param):
        local = _cut_by_torch(whole, param)
    else:
        local = layout_of(param, shape=whole.shape).cut(whole, this_rank())
    return as_dtensor(local.to(param.device), whole.shape, param.device_mesh, param.placements)

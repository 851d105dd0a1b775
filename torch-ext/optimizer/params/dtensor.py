"""Local tensors and metadata of DTensors, without communication and without DTensor's dispatch."""

from __future__ import annotations

import itertools
import sys
from operator import attrgetter

import torch
import torch.distributed as dist

PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}  # surely no DTensors
_placements = attrgetter("_spec.placements")  # of a DTensor


def is_dtensor(tensor) -> bool:
    """Whether `tensor` is a DTensor; imports nothing, since nobody has one before that module is
    imported.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor):
    """The tensor of this rank's elements, without DTensor's dispatch and outside autograd."""
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()


def raw_locals(tensors) -> list:
    """The tensors of this rank's elements, inside autograd: only to be looked at. Many, cheaply, at
    every step.
    """
    tensors, module = list(tensors), sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, tensors))
    if module is None or kinds <= PLAIN:  # the usual cases take no Python per tensor
        return tensors
    if kinds <= {module.DTensor, *PLAIN}:
        return list(map(getattr, tensors, itertools.repeat("_local_tensor"), tensors))
    return [t._local_tensor if isinstance(t, module.DTensor) else t for t in tensors]


def placements_of(tensors) -> list:
    """The placements of those that are DTensors, in order: where autograd left gradients."""
    tensors, module = list(tensors), sys.modules.get("torch.distributed.tensor")
    if module is None or set(map(type, tensors)) <= PLAIN:
        return []
    are_some = map(isinstance, tensors, itertools.repeat(module.DTensor))
    return list(map(_placements, itertools.compress(tensors, are_some)))


def is_mismatched(param) -> bool:
    """Whether the gradient has other placements than its parameter, such as Partial where
    SequenceParallel was used.
    """
    grad = param.grad
    return (
        is_dtensor(param)
        and grad is not None
        and getattr(grad, "placements", None) != param.placements
    )


def mismatched_placements(params) -> dict:
    """{number: placements of its gradient} of parameters whose gradients are astray."""
    return {
        i: getattr(p.grad, "placements", None) for i, p in enumerate(params) if is_mismatched(p)
    }


def form_of(param) -> tuple:
    """What a plan depends on besides the parameter itself: other memory may come with another form."""
    return param.shape, param.dtype, param.device, param._spec if is_dtensor(param) else None


def zeros_of(param, dtype):
    """Zeros like a parameter, in its order of memory. A DTensor's own zeros_like takes
    milliseconds.
    """
    zeros = torch.zeros_like(local_of(param), dtype=dtype, requires_grad=False)
    if not is_dtensor(param):
        return zeros
    return as_dtensor(zeros, param.shape, param.device_mesh, param.placements, param.stride())


def as_dtensor(local, shape, mesh, placements, stride=None):
    """The DTensor of a global `shape` of which this rank stores `local`; nothing is sent or
    checked.
    """
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def is_by_rows(tensor, group) -> bool:
    """Whether `by_rows` could have made it."""
    if (
        not is_dtensor(tensor)
        or tensor.device_mesh.ndim != 1
        or not tensor.placements[0].is_shard(0)
    ):
        return False
    return tensor.device_mesh.mesh.tolist() == dist.get_process_group_ranks(group)


def is_placed_like(value, param) -> bool:
    """Whether each rank has the same elements of both."""
    if not (is_dtensor(value) and is_dtensor(param)):
        return is_dtensor(value) == is_dtensor(param)
    ours, theirs = param.device_mesh, value.device_mesh
    return value.placements == param.placements and (
        ours is theirs or torch.equal(ours.mesh, theirs.mesh)
    )


def gradient_dtype(param):
    """The dtype in which all ranks exchange the gradient of a parameter, whether or not they have
    one.
    """
    # Torch before 2.10 has no such attribute; None: any dtype
    dtype = getattr(param, "grad_dtype", param.dtype)
    return dtype or torch.promote_types(param.dtype, torch.float32)

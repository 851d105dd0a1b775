"""Module hooks of overlap_forward: wait for weights before a module's forward, and before FSDP2
gathers shards.

`ModelHooks` registers all hooks of a model. A module waits for own parameters before the forward
(`WaitHook`). Parameters sharded by FSDP2 are read by an all-gather, possibly prefetched long before
the forward: `UnshardHook` wraps FSDP2's `unshard`.

Hooks hold weak references to the optimizer's `ForwardOverlap`: a model must not keep an optimizer
alive. If no hook can wait for a parameter, `step` waits for the update of the parameter.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

Keys = set[int]  # ids of parameters


class Waiter(Protocol):
    """The part of `forward.ForwardOverlap` that hooks use."""

    events: list  # of the last step; empty: nothing to wait for

    def wait(self) -> None:
        """Let the current stream wait for the whole last step."""

    def wait_for_params(
        self, params: frozenset[int], reader: torch.cuda.Stream | None = None
    ) -> None:
        """Let `reader`, or with None the current stream, wait until `params` are written."""


# Weak reference to a `Waiter`, or after `remove` a function that returns None
OverlapRef = Callable[[], Waiter | None]


class ModelHooks:
    """The hooks of a model for an optimizer."""

    def __init__(
        self, model: nn.Module, params: Mapping[int, torch.Tensor], overlap: Waiter
    ) -> None:
        """Register all hooks. `params`: the optimizer's parameters by id. Warns if the parameters
        are gathered in an unknown way (FSDP1, other versions of torch): then no module waits.
        """
        # Parameters for which a hook waits: id -> weak reference
        self.known: dict[int, weakref.ref] = {}
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.unshard_hooks: weakref.WeakSet[UnshardHook] = weakref.WeakSet()
        overlap = weakref.ref(overlap)
        gathers = _all_gathers(model)
        if gathers is None:
            warnings.warn(
                "overlap_forward=True: this model's parameters are gathered in a way that is not "
                "known here, so that step() waits until its weights are written",
                stacklevel=4,
            )
            return
        gathers = [(module, group, keys & set(params)) for module, group, keys in gathers]
        # Sharded parameters of FSDP2 are read by the all-gather alone, not by a module
        gathered = set().union(*(keys for *_, keys in gathers))
        points, eager, unsafe = _wait_points(
            model, (_keys(model.parameters()) & set(params)) - gathered
        )
        # The forward of an FSDP2 module waits in the current stream, `UnshardHook` in the stream of
        # the all-gather only
        for module, _, keys in gathers:
            points[module] = points.get(module, set()) | keys
        for group, keys in {id(group): (group, keys) for _, group, keys in gathers}.values():
            self.unshard_hooks.add(UnshardHook(group, overlap, keys))
        for module, hook in [
            *((m, WaitHook(overlap, keys)) for m, keys in points.items()),
            *((m, EagerWaitHook(overlap, keys)) for m, keys in eager.items()),
        ]:
            # Before FSDP2's own hook, which starts the all-gather
            self.handles.append(module.register_forward_pre_hook(hook, prepend=True))
        # state_dict() reads weights, load_state_dict() writes weights: both wait for the whole step
        for module in {model, *points, *eager} if not _is_script(model) else ():
            self.handles += [
                module.register_state_dict_pre_hook(WaitHook(overlap)),
                module.register_load_state_dict_pre_hook(WaitHook(overlap)),
            ]
        waiting = set().union(*points.values()) - unsafe
        self.known = {key: weakref.ref(params[key]) for key in waiting}

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in [*self.handles, *self.unshard_hooks]:
            handle.remove()
        self.known = {}
        self.handles = []


class WaitHook:
    """A hook to let the current stream wait until some parameters are written.

    A copy or an unpickled hook, as of a deep-copied module, does nothing and can be loaded without
    the package. In torch.export the hook does nothing.
    """

    def __init__(self, overlap: OverlapRef, keys: Keys | None = None) -> None:
        """`keys`: parameters to wait for; None: the whole step."""
        self.overlap = overlap
        self.keys = None if keys is None else frozenset(keys)

    def __call__(self, *_: object) -> None:
        """Wait; takes the arguments of any hook."""
        if not torch.compiler.is_exporting():
            self._wait()

    # In compiled code the call is a graph break: torch.compile cannot trace the wait
    @torch._disable_dynamo
    def _wait(self) -> None:
        """Wait, unless the optimizer is gone."""
        if (overlap := self.overlap()) is not None:
            overlap.wait() if self.keys is None else overlap.wait_for_params(self.keys)

    def __reduce__(self) -> tuple:
        """Pickle as `contextlib.nullcontext().__exit__`: takes any arguments and does nothing."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class EagerWaitHook(WaitHook):
    """A hook for a module inside a compiled module: does nothing in compiled code, where the
    compiled module has already waited. The module may also be called directly.
    """

    def __call__(self, *_: object) -> None:
        """Wait, outside of compiled code."""
        if not torch.compiler.is_compiling():
            self._wait()


class UnshardHook:
    """Wraps `unshard` of an FSDP2 parameter group: the stream that copies the shards for the
    all-gather waits first.

    Every all-gather goes through `unshard`: of forward and backward, of prefetching, and of an
    explicit `module.unshard()`.
    """

    def __init__(self, group: FSDPParamGroup, overlap: OverlapRef, keys: Keys) -> None:
        """Put the hook in place of `group.unshard`."""
        self.group = group
        self.gather = group.unshard  # FSDP2's own method, or the hook of another optimizer
        self.overlap = overlap
        self.keys = frozenset(keys)
        group.unshard = self

    def __call__(self, async_op: bool = False) -> object:
        """Wait, then call FSDP2's `unshard`."""
        if (overlap := self.overlap()) is not None and overlap.events:
            reader, _ = self.group.comm_ctx.get_all_gather_streams(
                async_op, self.group._training_state
            )
            overlap.wait_for_params(self.keys, reader)
            # On a mesh of size 1 there is no all-gather: the current stream copies the parameters
            if getattr(self.group.mesh_info, "shard_mesh_size", 1) == 1:
                overlap.wait_for_params(self.keys)
        return self.gather(async_op)

    def remove(self) -> None:
        """Restore `unshard`. If a second optimizer has wrapped this hook, stay in place and do
        nothing.
        """
        self.overlap = lambda: None
        if vars(self.group).get("unshard") is self:
            self.group.unshard = self.gather


def _all_gathers(model: nn.Module) -> list[tuple[nn.Module, FSDPParamGroup, Keys]] | None:
    """[(module, FSDP2 parameter group, parameters)] of all groups of a model.

    [] without FSDP. None for FSDP1, and if FSDP2 lacks an attribute used by `UnshardHook` (known
    from torch 2.11 to 2.15).
    """
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    # FSDP1 gathers flat parameters, in ways that no hook of this module sees
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return None
    found = []
    try:
        for module in [module for module in model.modules() if isinstance(module, FSDPModule)]:
            state = module._get_fsdp_state()
            # Newer versions of torch keep several groups for a module
            groups = (
                state._fsdp_param_groups
                if hasattr(state, "_fsdp_param_groups")
                else [state._fsdp_param_group]
            )
            found += [
                (module, group, _keys(p.sharded_param for p in group.fsdp_params))
                for group in groups
                if group
            ]
        # Private attributes of torch: look now, rather than fail in a forward
        for _, group, _ in found:
            _ = (
                group.unshard,
                group.comm_ctx.get_all_gather_streams,
                group._training_state,
                group.mesh_info,
            )  # noqa: B018
    except AttributeError:
        return None
    return found


def _wait_points(
    model: nn.Module, keys: Keys
) -> tuple[dict[nn.Module, Keys], dict[nn.Module, Keys], Keys]:
    """Choose the modules that wait for parameters `keys`.

    Return (modules -> parameters, modules inside compiled modules -> parameters, parameters that
    nobody may wait for). In general a module waits for its own parameters. A module in a list
    (typically a transformer block), a compiled module and a DataParallel module wait for all
    parameters below, because submodules may be used without a call. The model waits for all
    parameters outside of lists.
    """
    # TorchScript modules have no hooks
    scripted = (
        set().union(*(_keys(m.parameters()) for m in model.modules() if _is_script(m))) & keys
    )
    keys = keys - scripted
    modules = [module for module in model.modules() if not _is_script(module)]
    points = {module: _own(module) & keys for module in modules}
    listed = set()  # modules in lists, and all modules below
    for module in _listed(model):
        points[module] = _keys(module.parameters()) & keys
        listed.update(module.modules())
    outside = set().union(*(own for module, own in points.items() if module not in listed))
    if model in points:
        points[model] |= outside
    inside = set()  # modules below a compiled module
    for module in filter(_is_opaque, modules):
        # A caller may call the wrapped module itself instead of the wrapper
        for one in {module, *_wrapped(module)}.intersection(modules):
            points[one] = _keys(module.parameters()) & keys
        inside.update(set(module.modules()) - {module})
    points = {m: own for m, own in points.items() if own}
    eager = {m: points.pop(m) for m in inside & set(points)}
    # Without a forward of its own the model's hook never runs
    return points, eager, scripted | (set() if _is_called(model) else outside)


def _own(module: nn.Module) -> Keys:
    """Parameters of the module itself, and of children without a call or without children."""
    found = _keys(module.parameters(recurse=False))
    is_list = _is_list(module)
    for child in module.children():
        if not _is_called(child) or not is_list and next(child.children(), None) is None:
            found |= _own(child)
    return found


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in lists, such as transformer blocks."""
    for child in module.children():
        if _is_called(child) and _is_list(module):
            yield child
        else:
            yield from _listed(child)


def _is_list(module: nn.Module) -> bool:
    """Whether the module is a Sequential, or a container without a forward (ModuleList)."""
    return isinstance(module, nn.Sequential) or not _has_forward(module)


def _is_called(module: nn.Module) -> bool:
    """Whether forward pre-hooks of the module run: not for a container, TorchScript, or a class
    with a `__call__` of its own, which may skip hooks.
    """
    own_call = type(module).__call__ is not nn.Module.__call__ and not isinstance(
        module, torch.fx.GraphModule
    )
    return _has_forward(module) and not (own_call or _is_script(module)) or _is_compiled(module)


def _has_forward(module: nn.Module) -> bool:
    """Whether the module defines a forward."""
    own = _is_script(module) or "forward" in vars(module)
    return own or type(module).forward is not nn.Module.forward or _is_compiled(module)


def _is_script(module: nn.Module) -> bool:
    """Whether the module is TorchScript."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_opaque(module: nn.Module) -> bool:
    """Whether the module uses submodules without running their hooks: compiled code, or replicas on
    several devices.
    """
    return _is_compiled(module) or isinstance(module, nn.DataParallel)


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled: by `module.compile()`, by a compiled `forward`, or as the
    result of `torch.compile(module)`.
    """
    forward = getattr(module, "forward", None)
    in_place = module._compiled_call_impl is not None or hasattr(
        forward, "_torchdynamo_orig_callable"
    )
    return in_place or "_orig_mod" in module._modules


def _wrapped(module: nn.Module) -> list[nn.Module]:
    """The module inside of torch.compile's wrapper, or of DataParallel."""
    return [module._modules[name] for name in ("_orig_mod", "module") if name in module._modules]


def _keys(params: Iterable[torch.Tensor]) -> Keys:
    """The ids of parameters."""
    return set(map(id, params))

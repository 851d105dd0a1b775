"""Module hooks that wait for weights: before a module's forward, and before FSDP2 gathers its
shards.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref

import torch
from torch import nn


class ModelHooks:
    """The hooks of one model for one optimizer, whose `late` is asked to wait; it keeps neither
    alive. `known`: the parameters for which somebody waits, by id.
    """

    def __init__(self, model, params, late):
        self.known, self.handles, self.gates, late = {}, [], weakref.WeakSet(), weakref.ref(late)
        gathers = _all_gathers(model)
        if gathers is None:
            warnings.warn(
                "overlap_forward=True: this model's parameters are gathered in a way that is not "
                "known here, "
                "so that step() waits until its weights are written",
                stacklevel=4,
            )
            return
        gathers = [(module, group, keys & set(params)) for module, group, keys in gathers]
        gathered = set().union(*(keys for *_, keys in gathers))
        stops, quiet, unseen = _wait_points(
            model, (_keys(model.parameters()) & set(params)) - gathered
        )
        for module, _, keys in gathers:
            stops[module] = stops.get(module, set()) | keys
        for group, keys in {id(group): (group, keys) for _, group, keys in gathers}.values():
            self.gates.add(UnshardHook(group, late, keys))
        for module, hook in [
            *((m, WaitHook(late, keys)) for m, keys in stops.items()),
            *((m, EagerWaitHook(late, keys)) for m, keys in quiet.items()),
        ]:
            # Before FSDP2's own
            self.handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for module in {model, *stops, *quiet} if not _is_script(model) else ():
            self.handles += [
                module.register_state_dict_pre_hook(WaitHook(late)),
                module.register_load_state_dict_pre_hook(WaitHook(late)),
            ]
        met = set().union(*stops.values()) - unseen
        self.known = {key: weakref.ref(params[key]) for key in met}

    def remove(self) -> None:
        """Nothing waits any more."""
        for handle in [*self.handles, *self.gates]:
            handle.remove()
        self.known, self.handles = {}, []


class WaitHook:
    """A hook that waits for parameters, by id; None: for everything. Copies of it, as of its
    module, do nothing, and are loaded where this package is not; what is exported has no hooks.
    """

    def __init__(self, late, keys=None):
        self.late, self.keys = late, None if keys is None else frozenset(keys)

    def __call__(self, *_) -> None:
        if not torch.compiler.is_exporting():
            self._wait()

    @torch._disable_dynamo  # a compiled region breaks here
    def _wait(self) -> None:
        if (late := self.late()) is not None:
            late.wait() if self.keys is None else late.wait_for_params(self.keys)

    def __reduce__(self):
        # Takes whatever comes, and does nothing
        return getattr, (contextlib.nullcontext(), "__exit__")


class EagerWaitHook(WaitHook):
    """One that does nothing inside a compiled region, whose module has waited before."""

    def __call__(self, *_) -> None:
        if not torch.compiler.is_compiling():
            self._wait()


class UnshardHook:
    """Stands before FSDP2's all-gather of some parameters, whoever wants it: the module's forward
    or backward, one that prefetches, `unshard()`. The stream that reads the shards waits.
    """

    def __init__(self, group, late, keys):
        self.group, self.gather, self.late, self.keys = group, group.unshard, late, frozenset(keys)
        group.unshard = self

    def __call__(self, async_op=False):
        if (late := self.late()) is not None and late.events:
            reader, _ = self.group.comm_ctx.get_all_gather_streams(
                async_op, self.group._training_state
            )
            late.wait_for_params(self.keys, reader)
            # Whole here: the current stream copies them
            if getattr(self.group.mesh_info, "shard_mesh_size", 1) == 1:
                late.wait_for_params(self.keys)
        return self.gather(async_op)

    def remove(self) -> None:
        """Let the way be free; another optimizer's gate before this one stays."""
        self.late = lambda: None
        if vars(self.group).get("unshard") is self:
            self.group.unshard = self.gather


def _all_gathers(model):
    """[(module, what FSDP2 gathers for it at once, the ids of its parameters)]. None: parameters
    are gathered, but not as FSDP2 does it in torch 2.11 to 2.13.
    """
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return None
    found = []
    try:
        for module in [module for module in model.modules() if isinstance(module, FSDPModule)]:
            state = module._get_fsdp_state()
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


def _wait_points(model, keys):
    """({module: those of `keys` for which it waits}, the same of modules that may be inside a
    compiled region, those for which nobody may wait).

    A module waits for its own parameters; one that is in a list, compiled or replicated, for all
    below it, which it may use without calling who has them; the model for all that is in no list.
    """
    scripted = (
        set().union(*(_keys(m.parameters()) for m in model.modules() if _is_script(m))) & keys
    )
    keys, modules = (
        keys - scripted,
        [module for module in model.modules() if not _is_script(module)],
    )
    stops, listed, inside = {module: _own(module) & keys for module in modules}, set(), set()
    for module in _listed(model):
        stops[module] = _keys(module.parameters()) & keys
        listed.update(module.modules())
    outside = set().union(*(own for module, own in stops.items() if module not in listed))
    if model in stops:
        stops[model] |= outside
    for module in filter(_is_whole, modules):
        for one in {module, *_wrapped(module)}.intersection(modules):
            stops[one] = _keys(module.parameters()) & keys
        inside.update(set(module.modules()) - {module})
    stops = {m: own for m, own in stops.items() if own}
    quiet = {m: stops.pop(m) for m in inside & set(stops)}
    return stops, quiet, scripted | (set() if _is_called(model) else outside)


def _own(module) -> set:
    """The parameters that a module has itself, or in children that are not called or have no
    children.
    """
    found, is_list = _keys(module.parameters(recurse=False)), _is_list(module)
    for child in module.children():
        if not _is_called(child) or not is_list and next(child.children(), None) is None:
            found |= _own(child)
    return found


def _listed(module):
    """The outermost modules in lists."""
    for child in module.children():
        if _is_called(child) and _is_list(module):
            yield child
        else:
            yield from _listed(child)


def _is_list(module) -> bool:
    return isinstance(module, nn.Sequential) or not _has_forward(module)


def _is_called(module) -> bool:
    """Whether it has a forward before which its hooks run: a `__call__` of its class' own may run
    none.
    """
    own_call = type(module).__call__ is not nn.Module.__call__ and not isinstance(
        module, torch.fx.GraphModule
    )
    return _has_forward(module) and not (own_call or _is_script(module)) or _is_compiled(module)


def _has_forward(module) -> bool:
    own = _is_script(module) or "forward" in vars(module)
    return own or type(module).forward is not nn.Module.forward or _is_compiled(module)


def _is_script(module) -> bool:
    """Whether it is TorchScript, which has no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_whole(module) -> bool:
    """Whether it uses what is below it without calling that: compiled code, or copies on other
    devices.
    """
    return _is_compiled(module) or isinstance(module, nn.DataParallel)


def _is_compiled(module) -> bool:
    forward = getattr(module, "forward", None)
    in_place = module._compiled_call_impl is not None or hasattr(
        forward, "_torchdynamo_orig_callable"
    )
    return in_place or "_orig_mod" in module._modules


def _wrapped(module) -> list:
    """What a whole module is put round, which may be called past it."""
    return [module._modules[name] for name in ("_orig_mod", "module") if name in module._modules]


def _keys(params) -> set:
    return set(map(id, params))

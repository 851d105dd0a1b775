"""The optimizer: options, parameter groups, and one step.

Decides when to plan (collectively, for other parameters or placements) and when to bind again (at this rank, for
moved memory); everything else is done by the layers below.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from . import pipeline
from .bind import Planner, bind
from .feed import Feed
from .graphs import Graphs, release_before_groups
from .groups import check_group, check_unique, name_of
from .layout import is_dtensor, local_of, raw_locals, this_rank
from .loaded import Loading
from .owned import present
from .plan import ALIGNMENT
from .process_groups import Groups
from .recipe import baked
from .report import Report, Stopwatch, report_of
from .routes import Elementwise, Presence
from .store import check_dense, form_of_zeros

# what capturable=True says, once each, where a graph does not fit
OTHER_NUMBERS = "the step is not replayed, since a number other than lr, weight_decay and momentum changed"
OTHER_PLACES = "AdamW's step is not replayed, since gradients lie elsewhere or a number other than lr changed"
OTHER_PARAMETERS = ("the step is not replayed, since parameters, their memory or the form of gradients changed or a "
                    "gradient is missing")


@dataclass(frozen=True)
class Options:
    """What holds for the whole optimizer: the keyword arguments of `Muon` that no group can change."""
    process_group: object = None
    grads_are_reduced: bool = True
    state_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.bfloat16
    ns_dtype: torch.dtype | None = None
    workspace_bytes: int | None = None
    capturable: bool = False

    def check(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        wide = (torch.float32, torch.bfloat16)
        for key, allowed in (("state_dtype", wide), ("wire_dtype", wide), ("ns_dtype", (None, *wide, torch.float16))):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}={getattr(self, key)} is not allowed: it must be one of {allowed}")
        room = self.workspace_bytes
        if room is not None and (type(room) is not int or room < 1):
            raise ValueError(f"workspace_bytes={room!r} is not allowed: it must be a whole number >= 1, or None")
        if type(self.capturable) is not bool:
            raise ValueError(f"capturable={self.capturable!r} is not allowed: it must be True or False")
        if not self.grads_are_reduced and self.process_group is None:
            raise ValueError("grads_are_reduced=False needs process_group: the ranks over which gradients are averaged")
        if self.process_group is not None and not dist.is_initialized():
            raise ValueError("process_group was given, but torch.distributed is not initialized: "
                             "call init_process_group first")

    def workspace(self, device) -> int:
        """The bytes that buckets may take of one rank, all together."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        if device.type != "cuda":
            return 256 << 20
        return min(2 << 30, torch.cuda.get_device_properties(device).total_memory * 3 // 100)


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for the rest, on any sharding (Keller Jordan, 2024; arXiv 2502.16982).

    params: parameters, named parameters or groups. Groups with use_muon=True (the default) hold parameters (..., R,
    C), each (R, C) a matrix; groups with use_muon=False go to AdamW. lr, weight_decay, momentum, nesterov,
    ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon and settable per group. ns_coefficients: the
    name of a set, a triple or ns_steps triples. adjust_lr_fn: None or "original", "match_rms_adamw", "rms_norm",
    "spectral_norm". adamw_betas, adamw_eps: defaults of `betas` and `eps` in AdamW groups.

    process_group: the ranks that hold copies of plain (non-DTensor) parameters, among which the work is then split;
    None means that every process steps its plain parameters alone. grads_are_reduced=False: the gradients of plain
    parameters have not been averaged over process_group; the optimizer does it, and each owner alone keeps the state.
    Gradients of matrices are then rounded to wire_dtype before they are averaged in fp32 (AdamW's are not).
    state_dtype: of momentum_buffer, exp_avg and exp_avg_sq. wire_dtype: of updates between home and owner, on every
    layout, so that all layouts give the same bits. ns_dtype: of the Newton-Schulz products; None means fp16 on
    accelerators and fp32 on CPUs. workspace_bytes: bound on the memory for travelling updates, ValueError at the first
    step if one matrix per rank takes more; None means the smaller of 2 GiB and 3 % of the device, or what it must.
    capturable=True: on NVIDIA GPUs the step, its collectives included, is captured as a CUDA graph in the second step
    and replayed; without, only the parts between collectives are. Either way the bits are the same, and lr,
    weight_decay and momentum may change at every step (weight_decay of AdamW: at the price of a new capture).

    Raises ValueError or NotImplementedError at construction for what could not be stepped.
    """
    timing, _extra_keys, _graphs, _beside = False, (), None, None

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients="polar_express",
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None, *, adamw_betas=(0.9, 0.95), adamw_eps=1e-8, **options):
        extra = {key: options.pop(key) for key in self._extra_keys}
        self._options, self._adamw = Options(**options), {"betas": adamw_betas, "eps": adamw_eps}
        self._options.check()
        self._forget()
        super().__init__(params, {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True, **extra})

    def add_param_group(self, param_group) -> None:
        """Add a group; see the class for what it may hold."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, not {type(param_group).__name__}")
        if not param_group.get("use_muon", True):
            for key, value in self._adamw.items():
                param_group.setdefault(key, value)
        count = len(self.param_groups)
        try:
            check_unique(param_group, self.param_groups)
            super().add_param_group(param_group)
            check_group(self.param_groups[-1], self._extra_keys)
            self._check_together()
        except Exception:
            del self.param_groups[count:]
            raise
        self._forget()

    def _check_together(self) -> None:
        """What concerns more than one parameter: devices, and who reduces the gradients."""
        everything = [(group, i, p) for group in self.param_groups for i, p in enumerate(group["params"])]
        for group, i, param in everything:
            if is_dtensor(param) and not self._options.grads_are_reduced:
                raise ValueError(f"grads_are_reduced=False, but parameter {name_of(group, i)} is a DTensor, whose "
                                 "gradients its parallelism reduces: leave the option out, or use plain parameters")
        first, *others = everything
        for group, i, param in others:
            if param.device != first[2].device:
                raise ValueError(f"parameter {name_of(group, i)} is on {param.device}, but {name_of(*first[:2])} is on "
                                 f"{first[2].device}; an optimizer steps one device: move the model, or build one each")

    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns the closure's loss. The first step plans: all ranks have to take it together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _on(local_of(self.param_groups[0]["params"][0]).device):
            for store in self._ready():
                store.read()
            self._feed.send()
            self._presence.save()
            self._launch()
            self._presence.settle()
        return loss

    def _launch(self) -> None:
        """All work of the step; with `capturable`, as one graph and one for each AdamW group that knows no ranks."""
        if self.timing:
            self._watch = Stopwatch(self._stores[0].device) if self._stores else None
            return self._run(self._watch.over(self._jobs + self._alone) if self._watch else [])
        if not self._options.capturable:
            return self._run()
        key = [baked(store.hp, store.wide) for store in self._together]
        pipeline.beside(lambda: self._graphs(self._run, key), self._alone, self._beside.stream)

    def _run(self, jobs=None) -> None:
        pipeline.run(self._jobs if jobs is None else jobs)
        self._presence.compare()

    def plan_report(self) -> Report:
        """The plan of the last step, as this rank knows it: print it, or draw its `figure()`. Not collective.

        Set the attribute `timing` to True before a step to have that step's times in it; such a step is not replayed
        from one graph. RuntimeError before the first step, which makes the plan.
        """
        if not self._jobs + self._alone:
            raise RuntimeError("there is no plan yet: the first step makes it (call step() before plan_report())")
        return report_of(self._jobs + self._alone, this_rank(), self._watch)

    def _ready(self):
        """The stores of this step. Planned anew if parameters changed, bound anew if memory or gradients' form did."""
        for alone in (False, True):  # what this process steps alone must not change what it steps with others
            units = [(group, params) for group in self.param_groups if (params := self._stepped(group, alone))]
            key = [(g["use_muon"], g["adjust_lr_fn"], tuple(map(id, params))) for g, params in units]
            if key != self._planned_for[alone]:
                planner = Planner(self._options, self._groups, self.state, alone)
                self._plans[alone] = [plan for unit in units for plan in planner.plan(*unit)]
                self._planned_for[alone], self._bound_for = key, None
        plans = self._plans[False] + self._plans[True]
        key = _memory_key([p for plan in plans for p in plan.params], self.state)
        if key != self._bound_for:
            self._presence.wait()
            self._graphs.say(OTHER_PARAMETERS)
            for graphs in (self._graphs, self._beside):
                graphs.begin(local_of(self.param_groups[0]["params"][0]).device)
            self._stores, jobs = bind(plans, self._options, self._groups, self.state, (self._graphs, self._beside))
            if self._options.capturable and self._graphs.on:
                self._groups.check_capturable()
                release_before_groups()
            self._presence, self._bound_for = Presence(plans, self._stores, self._groups), key
            self._feed, self._watch = Feed(self._stores, self._presence), None
            # what holds addresses of gradients is a graph of its own: other ranks do not wait when it is made anew
            self._alone = [job for job in jobs if self._options.capturable and isinstance(job[0], Elementwise)]
            self._jobs = [job for job in jobs if job not in self._alone]
            self._together = [s for s in self._stores if all(s is not route.store for route, _ in self._alone)]
        return self._stores

    def _stepped(self, group, alone) -> list:
        """The parameters of a step that this process takes alone, or with other ranks.

        Where ranks must act alike, a missing gradient does not leave a parameter out; alone it does, as in torch.
        """
        shared = self._options.process_group is not None
        params = [p for p in group["params"] if p.requires_grad and (not shared and not is_dtensor(p)) == alone]
        return [p for p in params if p.grad is not None] if alone else params

    def _forget(self) -> None:
        """Drop plans and bound memory; the next step makes them anew. State stays."""
        self._planned_for, self._bound_for = {False: None, True: None}, None
        self._plans, self._stores, self._jobs, self._alone = {False: [], True: []}, [], [], []
        self._groups, self._presence, self._feed, self._watch = Groups(), Presence(), None, None
        excuses = (OTHER_NUMBERS, OTHER_PLACES) if self._options.capturable else ("", "")
        if self._graphs is None:
            self._graphs, self._beside = map(Graphs, excuses)
        for graphs in (self._graphs, self._beside):
            graphs.drop()

    def state_dict(self) -> dict:
        """As in torch. With grads_are_reduced=False collective over process_group, whose ranks each have a part of the
        state: it comes as DTensors cut by rows, which any layout reads.
        """
        if self._options.grads_are_reduced:
            return super().state_dict()
        named = {p: name_of(group, i) for group in self.param_groups for i, p in enumerate(group["params"])}
        held = self.state
        self.state = present(held, named, self._options.process_group)
        try:
            return super().state_dict()
        finally:
            self.state = held

    def load_state_dict(self, state_dict) -> None:
        """As in torch, from any layout: tensors that lie otherwise than the parameters are moved, and get the dtype of
        `state_dtype`. What the saved groups lack (those of torch.optim.Muon or AdamW, or of an older version) stays
        this optimizer's own. Raises ValueError, before anything is changed, for state of another shape or kind.
        """
        loading = Loading(self.param_groups, self._options)
        hooks = [self.register_load_state_dict_pre_hook(loading.take),
                 self.register_load_state_dict_post_hook(loading.settle, prepend=True)]  # before those of others
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        self._forget()

    def __getstate__(self):
        options = replace(self._options, process_group=getattr(self._options.process_group, "group_name", None))
        return {**super().__getstate__(), "_options": options, "_adamw": self._adamw}

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        if isinstance(self._options.process_group, str):
            group = dist.distributed_c10d._resolve_process_group(self._options.process_group)
            self._options = replace(self._options, process_group=group)
        self._forget()


class NorMuon(Muon):
    """Muon whose update is divided, row by row, by the root of its mean square over time (arXiv 2510.05491).

    beta2: decay of that mean square, kept in fp32 as `second_moment` (..., R, 1); all else as in `Muon`.
    """
    _extra_keys = ("beta2",)

    def __init__(self, params, *args, beta2=0.95, **kwargs):
        super().__init__(params, *args, beta2=beta2, **kwargs)


def _memory_key(params, state):
    """What bound views and launches depend on: where parameters and state lie, and how the gradients are laid out."""
    gradients = [p.grad for p in params]
    there = [g for g in gradients if g is not None]
    check_dense(there)
    forms = iter([(g.dtype, g.stride(), g.data_ptr() % ALIGNMENT) for g in raw_locals(there)])
    return ([t.data_ptr() for t in raw_locals(t for p in params for t in (p, *state[p].values()))],
            [next(forms) if g is not None else form_of_zeros(p) for p, g in zip(params, gradients)])


def _on(device):
    """Kernels are launched on the current device, which need not be the parameters'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
